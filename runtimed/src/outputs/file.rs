//! The place of a Run's outputs: a directory made before any of its code runs, held open, and one
//! name in it. The function may do there whatever it likes; nothing it makes of it leads elsewhere.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::{Mode, fchmod},
    unistd::{UnlinkatFlags, unlinkat},
};

use super::FILE_BYTES;
use crate::{journal::blocking, source::clear};

/// In the Run's directory; no source may begin with it.
pub const RESERVED_DIR: &str = ".kruntimes";
/// The file's name.
pub const FILE: &str = "outputs";

/// The open directory. Clones share it.
#[derive(Debug, Clone)]
pub struct OutputsDir {
    dir: Arc<OwnedFd>,
}

/// What a call left.
#[derive(Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// At most one byte more than the file may have.
    Bytes(Vec<u8>),
    /// Something that is no readable regular file.
    Unusable,
}

// === impl OutputsDir ===

impl OutputsDir {
    /// Opens the directory in `run`, the directory of the Run beneath `root`; `None` when there is none.
    /// A link on the way is not followed. Blocks.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn open(root: &Path, run: &str) -> io::Result<Option<Self>> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let root = open(root, flags, Mode::empty())?;
        let path: PathBuf = [run, RESERVED_DIR].iter().collect();
        match openat2(&root, &path, beneath(flags)) {
            Ok(dir) => Ok(Some(Self { dir: Arc::new(dir) })),
            Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes away what an earlier call left: one system call when there is nothing, which is usual.
    ///
    /// # Errors
    /// When the file system refuses.
    pub async fn empty(&self) -> io::Result<()> {
        match unlinkat(&*self.dir, FILE, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            // A directory in its place, or the function has closed the directory above.
            Err(Errno::EISDIR | Errno::EACCES) => {
                let dir = Arc::clone(&self.dir);
                let clear = move || {
                    let _ = fchmod(&*dir, Mode::S_IRWXU);
                    clear::clear_in(&dir, OsStr::new(FILE))
                };
                blocking(clear).await
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Reads what the call left: one system call when there is nothing. Waits for nobody: a pipe has no
    /// content here.
    ///
    /// # Errors
    /// When the file system refuses to read.
    pub async fn read(&self) -> io::Result<Left> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let file = match openat2(&*self.dir, FILE, beneath(flags)) {
            Ok(file) => File::from(file),
            Err(Errno::ENOENT) => return Ok(Left::Nothing),
            // A link, a socket, a device, a file closed to its own user, too deep a nesting of mounts.
            Err(
                Errno::ELOOP
                | Errno::EXDEV
                | Errno::ENXIO
                | Errno::ENODEV
                | Errno::EACCES
                | Errno::EPERM
                | Errno::ENOTDIR,
            ) => return Ok(Left::Unusable),
            Err(errno) => return Err(errno.into()),
        };
        if !file.metadata()?.is_file() {
            return Ok(Left::Unusable);
        }
        blocking(move || {
            let mut bytes = Vec::new();
            file.take(FILE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
            Ok(Left::Bytes(bytes))
        })
        .await
    }
}

fn beneath(flags: OFlag) -> OpenHow {
    let resolve =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    OpenHow::new().flags(flags).resolve(resolve)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use tempfile::TempDir;

    use super::*;

    /// A workspace with one Run, and the path of its file.
    fn place() -> (TempDir, OutputsDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run").join(RESERVED_DIR);
        fs::create_dir_all(&dir).unwrap();
        let outputs = OutputsDir::open(root.path(), "run").unwrap().unwrap();
        (root, outputs, dir.join(FILE))
    }

    #[tokio::test]
    async fn what_one_call_left_the_next_does_not_see() {
        let (_root, outputs, path) = place();
        outputs.empty().await.unwrap();
        assert_eq!(outputs.read().await.unwrap(), Left::Nothing);
        fs::write(&path, "a=1").unwrap();
        assert_eq!(outputs.read().await.unwrap(), Left::Bytes(b"a=1".to_vec()));
        outputs.empty().await.unwrap();
        assert_eq!(outputs.read().await.unwrap(), Left::Nothing);
    }

    /// C-5.4: no symbolic link is followed, and only a regular file is read, whoever waits at a pipe.
    #[tokio::test]
    async fn only_a_regular_file_is_read_and_everything_else_goes() {
        let (root, outputs, path) = place();
        let secret = root.path().join("secret");
        fs::write(&secret, "password=1").unwrap();
        let fifo = |path: &Path| nix::unistd::mkfifo(path, Mode::S_IRWXU).unwrap();
        let makes: [&dyn Fn(&Path); 5] = [
            &|path| symlink(&secret, path).unwrap(),
            &|path| symlink("/proc/self/fd/0", path).unwrap(),
            &|path| fs::create_dir_all(path.join("deep/er")).unwrap(),
            &|path| fifo(path),
            &|path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
        ];
        for (number, make) in makes.iter().enumerate() {
            make(&path);
            assert_eq!(outputs.read().await.unwrap(), Left::Unusable, "{number}");
            outputs.empty().await.unwrap();
            assert!(fs::symlink_metadata(&path).is_err(), "{number} is gone");
        }
        assert_eq!(fs::read(&secret).unwrap(), b"password=1");
    }

    #[tokio::test]
    async fn a_file_that_never_ends_is_read_to_its_limit() {
        let (_root, outputs, path) = place();
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let Left::Bytes(bytes) = outputs.read().await.unwrap() else {
            panic!("a regular file")
        };
        assert_eq!(bytes.len(), FILE_BYTES + 1);
    }

    /// The function may move the directory away and put a link in its place: what is held is the directory.
    #[tokio::test]
    async fn a_directory_that_was_exchanged_leads_nowhere_else() {
        let (root, outputs, path) = place();
        let dir = path.parent().unwrap();
        let elsewhere = root.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join(FILE), "password=1").unwrap();
        fs::rename(dir, root.path().join("moved")).unwrap();
        symlink(&elsewhere, dir).unwrap();
        assert_eq!(outputs.read().await.unwrap(), Left::Nothing);
        outputs.empty().await.unwrap();
        assert!(elsewhere.join(FILE).exists());
        assert!(OutputsDir::open(root.path(), "run").is_err(), "after a restart");
        assert!(OutputsDir::open(root.path(), "other").unwrap().is_none());
    }
}
