//! Descriptors that the runtime watches for one kind of news. The only `unsafe` of the crate: Tokio asks for a promise that
//! its types cannot express, and it is kept for the two types that are used here.

#![expect(unsafe_code, reason = "see the module")]

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use tokio::io::{Interest, unix::AsyncFd};

/// Watches `socket` for what arrives.
pub(super) fn for_reading(socket: UnixStream) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: a std socket owns one descriptor, which stays open and the same until the socket drops; the AsyncFd
    // owns the socket, and gives nobody the means to replace it.
    unsafe { Ok(AsyncFd::register_with_interest(socket, Interest::READABLE)?) }
}

/// Watches a second descriptor of `socket` for room to write: a descriptor is watched once.
pub(super) fn for_writing(socket: &UnixStream) -> io::Result<AsyncFd<OwnedFd>> {
    let again = OwnedFd::from(socket.try_clone()?);
    // SAFETY: as above, for the descriptor that an OwnedFd owns.
    unsafe { Ok(AsyncFd::register_with_interest(again, Interest::WRITABLE)?) }
}
