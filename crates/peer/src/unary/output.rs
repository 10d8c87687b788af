//! What is to be written: small things one behind the other, large ones as they came.

use std::{collections::VecDeque, io::IoSlice};

use bytes::{Buf as _, Bytes, BytesMut};

/// From this size on bytes are not copied.
const LARGE: usize = 8 * 1024;
/// How much room is kept at rest.
const KEPT: usize = 64 * 1024;

/// A queue of bytes.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// Goes first.
    queue: VecDeque<Bytes>,
    /// Goes last. Frames are written into it.
    small: BytesMut,
    queued: usize,
}

// === impl Output ===

impl Output {
    /// Pieces of one write; more would not make it cheaper.
    pub(super) const PIECES: usize = 16;

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.small.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.queued + self.small.len()
    }

    /// Where small things are written.
    pub(super) fn small(&mut self) -> &mut BytesMut {
        &mut self.small
    }

    /// Adds bytes that are there already.
    pub(super) fn push(&mut self, bytes: Bytes) {
        if bytes.len() < LARGE {
            self.small.extend_from_slice(&bytes);
            return;
        }
        if !self.small.is_empty() {
            self.queued += self.small.len();
            self.queue.push_back(std::mem::take(&mut self.small).freeze());
        }
        self.queued += bytes.len();
        self.queue.push_back(bytes);
    }

    /// The first pieces, for one write.
    pub(super) fn pieces<'a>(&'a self, room: &mut [IoSlice<'a>; Self::PIECES]) -> usize {
        let last = (!self.small.is_empty()).then_some(&*self.small);
        let all = self.queue.iter().map(|bytes| &**bytes).chain(last);
        let mut count = 0;
        for (slot, bytes) in room.iter_mut().zip(all) {
            *slot = IoSlice::new(bytes);
            count += 1;
        }
        count
    }

    /// So many bytes were written.
    pub(super) fn written(&mut self, mut bytes: usize) {
        while let Some(first) = self.queue.front_mut() {
            let now = bytes.min(first.len());
            first.advance(now);
            self.queued -= now;
            bytes -= now;
            if !first.is_empty() {
                return;
            }
            self.queue.pop_front();
        }
        self.small.advance(bytes.min(self.small.len()));
        if self.small.is_empty() {
            if self.small.capacity() > KEPT {
                self.small = BytesMut::new();
            }
            self.small.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever comes in goes out, in its order, however little each write takes.
        #[test]
        fn what_comes_in_goes_out(
            sizes in prop::collection::vec((0..4_usize, any::<bool>()), 1..20),
            takes in prop::collection::vec(1..20_000_usize, 1..50),
        ) {
            let (mut output, mut expected, mut out) = (Output::default(), Vec::new(), Vec::new());
            let mut takes = takes.into_iter().cycle();
            for (number, (size, write)) in sizes.into_iter().enumerate() {
                let bytes = Bytes::from(vec![u8::try_from(number).unwrap(); [0, 10, LARGE, 3 * LARGE][size]]);
                expected.extend_from_slice(&bytes);
                output.push(bytes);
                prop_assert_eq!(output.len() + out.len(), expected.len());
                if write {
                    take(&mut output, &mut out, takes.next().unwrap());
                }
            }
            while !output.is_empty() {
                take(&mut output, &mut out, takes.next().unwrap());
            }
            prop_assert!(out == expected);
            prop_assert_eq!(output.queued, 0);
        }
    }

    fn take(output: &mut Output, out: &mut Vec<u8>, most: usize) {
        let mut room = [IoSlice::new(&[]); Output::PIECES];
        let count = output.pieces(&mut room);
        let all: Vec<u8> = room[..count].iter().flat_map(|piece| piece.to_vec()).collect();
        let now = most.min(all.len());
        out.extend_from_slice(&all[..now]);
        output.written(now);
    }
}
