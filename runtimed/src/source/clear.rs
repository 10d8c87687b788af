//! Removes a directory and all in it, whatever a function has made of it.
//!
//! However deep the tree is, this takes three open files and no stack: what lies deeper than one level
//! is moved up first. A recursive removal of a tree some thousand levels deep overflows the stack and
//! takes all of runtimed with it, again after each restart. Every step is relative to an open directory
//! and follows no symbolic link.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open, openat, renameat},
    sys::stat::{Mode, fchmod},
    unistd::{UnlinkatFlags, unlinkat},
};

const DIRECTORY: OFlag = OFlag::O_DIRECTORY
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// Removes `root/name` if it exists: a directory with all in it, or what was put in its place. Blocks.
///
/// # Errors
/// When the file system refuses.
pub fn clear(root: &Path, name: &OsStr) -> io::Result<()> {
    clear_in(&open(root, DIRECTORY, Mode::empty())?, name)
}

/// As [`clear`], in an open directory.
///
/// # Errors
/// When the file system refuses.
pub fn clear_in(root: &OwnedFd, name: &OsStr) -> io::Result<()> {
    if Removed::try_to(root, name)? == Removed::Yes {
        return Ok(());
    }
    let top = open_dir(root, name)?;
    let mut moved = 0;
    loop {
        let entries = entries(&top)?;
        if entries.is_empty() {
            break;
        }
        for entry in entries {
            if Removed::try_to(&top, &entry)? == Removed::No {
                lift(&top, &entry, &mut moved)?;
            }
        }
    }
    match unlinkat(root, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether something is gone.
#[derive(PartialEq, Eq)]
enum Removed {
    Yes,
    /// It is a directory with something in it.
    No,
}

// === impl Removed ===

impl Removed {
    fn try_to(dir: &OwnedFd, name: &OsStr) -> io::Result<Self> {
        match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(Self::Yes),
            Err(Errno::EISDIR) => {}
            Err(errno) => return Err(errno.into()),
        }
        match unlinkat(dir, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(Self::Yes),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(Self::No),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Empties the directory `name` in `top`: its directories that hold something move up into `top`.
fn lift(top: &OwnedFd, name: &OsStr, moved: &mut u64) -> io::Result<()> {
    let dir = open_dir(top, name)?;
    for entry in entries(&dir)? {
        if Removed::try_to(&dir, &entry)? == Removed::Yes {
            continue;
        }
        // Moving a directory writes its `..`: it must be open to this user.
        drop(open_dir(&dir, &entry)?);
        loop {
            *moved += 1;
            match renameat(&dir, entry.as_os_str(), top, format!("{moved}").as_str()) {
                Ok(()) | Err(Errno::ENOENT) => break,
                // The function has something of this name there.
                Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

/// Opens a directory and everything this user may do in it: a function may have closed it.
fn open_dir(parent: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let open = || openat(parent, name, DIRECTORY, Mode::empty());
    let dir = match open() {
        Err(Errno::EACCES) => {
            // Opened as a place only, so that it cannot be exchanged for a link before it is changed.
            let place = openat(parent, name, DIRECTORY | OFlag::O_PATH, Mode::empty())?;
            fs::set_permissions(path(&place), fs::Permissions::from_mode(0o700))?;
            open()?
        }
        opened => opened?,
    };
    // Another user's directory may still let us write; if not, the next step says so.
    let _ = fchmod(&dir, Mode::S_IRWXU);
    Ok(dir)
}

fn entries(dir: &OwnedFd) -> io::Result<Vec<OsString>> {
    fs::read_dir(path(dir))?
        .map(|entry| Ok(entry?.file_name()))
        .collect()
}

fn path(dir: &impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn gone(root: &Path) -> bool {
        clear(root, OsStr::new("run")).unwrap();
        clear(root, OsStr::new("run")).unwrap();
        fs::symlink_metadata(root.join("run")).is_err()
    }

    #[test]
    fn a_tree_deeper_than_the_stack_goes() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = open(root.path(), DIRECTORY, Mode::empty()).unwrap();
        let mut name = "run";
        for _ in 0..1_500 {
            nix::sys::stat::mkdirat(&dir, name, Mode::S_IRWXU).unwrap();
            dir = openat(&dir, name, DIRECTORY, Mode::empty()).unwrap();
            name = "d";
        }
        // As deep for this stack as tens of thousands of levels are for a usual one.
        let removes = std::thread::Builder::new().stack_size(64 * 1024);
        let path = root.path().to_owned();
        let removed = removes.spawn(move || gone(&path)).unwrap();
        assert!(removed.join().unwrap());
    }

    #[test]
    fn wide_and_deep_goes_also_where_names_are_taken() {
        let root = tempfile::tempdir().unwrap();
        for path in [
            "run/1/1/1/1",
            "run/2/1/2",
            "run/3/a/b",
            "run/a/1/x",
            "run/a/2/y/z",
        ] {
            fs::create_dir_all(root.path().join(path)).unwrap();
            fs::write(root.path().join(path).join("file"), "").unwrap();
        }
        fs::write(root.path().join("run/4"), "").unwrap();
        assert!(gone(root.path()));
    }

    #[test]
    fn what_was_put_in_place_of_the_directory_goes_and_no_more() {
        let root = tempfile::tempdir().unwrap();
        let kept = root.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        fs::write(root.path().join("run"), "a file").unwrap();
        assert!(gone(root.path()));
        symlink(&kept, root.path().join("run")).unwrap();
        assert!(gone(root.path()));
        fs::create_dir_all(root.path().join("run/a/b")).unwrap();
        symlink(&kept, root.path().join("run/a/b/link")).unwrap();
        assert!(gone(root.path()));
        assert!(kept.join("file").exists());
    }
}
