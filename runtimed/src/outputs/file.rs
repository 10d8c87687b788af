//! The place of a Run's outputs: a directory made before any of its code runs, held open, and one
//! name in it. The function may do there whatever it likes; nothing it makes of it leads elsewhere.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::{Mode, fchmod, fstat, fstatat, mkdirat},
    unistd::{UnlinkatFlags, unlinkat},
};

use super::FILE_BYTES;
use crate::{journal::blocking, source::clear};

/// In the Run's directory; no source may begin with it.
pub const RESERVED_DIR: &str = ".kruntimes";
/// The file's name.
pub const FILE: &str = "outputs";

/// Who may put outputs there: the function, which runs as the same user or in the same group.
const DIR_MODE: Mode = Mode::S_IRWXU.union(Mode::S_IRWXG);

const DIRECTORY: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_CLOEXEC);

/// The open directory. Clones share it.
#[derive(Debug, Clone)]
pub struct OutputsDir {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The Run's own directory.
    run: OwnedFd,
    /// The one in it; made anew when the function has removed it.
    dir: Mutex<Arc<OwnedFd>>,
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
    /// Nothing that can be found: its directory is gone, and with it whatever it held.
    Removed,
}

// === impl OutputsDir ===

impl OutputsDir {
    /// Opens the directory in `run`, the directory of the Run beneath `root`. A link on the way is not
    /// followed. Blocks.
    ///
    /// # Errors
    /// When the file system refuses, or the Run has no directory.
    pub fn open(root: &Path, run: &str) -> io::Result<Self> {
        let root = open(root, DIRECTORY, Mode::empty())?;
        let run = openat2(&root, run, beneath(DIRECTORY))?;
        let dir = Mutex::new(Arc::new(place(&run)?));
        Ok(Self {
            shared: Arc::new(Shared { run, dir }),
        })
    }

    /// Takes away what an earlier call left: two looks when there is nothing, which is usual.
    ///
    /// # Errors
    /// When the file system refuses.
    pub async fn empty(&self) -> io::Result<()> {
        let dir = self.dir();
        if is_removed(&dir)? {
            let shared = Arc::clone(&self.shared);
            return blocking(move || {
                let anew = place(&shared.run)?;
                // The function may have made it first, and left something there.
                remove(&anew)?;
                *shared.dir.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(anew);
                Ok(())
            })
            .await;
        }
        match fstatat(&*dir, FILE, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => Ok(()),
            // The end of a large file takes its time.
            _ => blocking(move || remove(&dir)).await,
        }
    }

    /// Reads what the call left: two looks when there is nothing. Waits for nobody: a pipe has no content
    /// here.
    ///
    /// # Errors
    /// When the file system refuses to read.
    pub async fn read(&self) -> io::Result<Left> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let dir = self.dir();
        let file = match openat2(&*dir, FILE, beneath(flags)) {
            Ok(file) => File::from(file),
            Err(Errno::ENOENT) if is_removed(&dir)? => return Ok(Left::Removed),
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

    fn dir(&self) -> Arc<OwnedFd> {
        let dir = self.shared.dir.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&dir)
    }
}

/// The directory in that of the Run, made if it is not there.
fn place(run: &OwnedFd) -> io::Result<OwnedFd> {
    match mkdirat(run, RESERVED_DIR, DIR_MODE) {
        Ok(()) | Err(Errno::EEXIST) => Ok(openat2(run, RESERVED_DIR, beneath(DIRECTORY))?),
        Err(errno) => Err(errno.into()),
    }
}

/// A directory that is open and in no other one any more.
fn is_removed(dir: &OwnedFd) -> io::Result<bool> {
    Ok(fstat(dir)?.st_nlink == 0)
}

/// Blocks.
fn remove(dir: &OwnedFd) -> io::Result<()> {
    match unlinkat(dir, FILE, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        // A directory in its place, or the function has closed the directory above.
        Err(Errno::EISDIR | Errno::EACCES) => {
            let _ = fchmod(dir, Mode::S_IRWXU);
            clear::clear_in(dir, OsStr::new(FILE))
        }
        Err(errno) => Err(errno.into()),
    }
}

fn beneath(flags: OFlag) -> OpenHow {
    let resolve =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    OpenHow::new().flags(flags).resolve(resolve)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::PathBuf};

    use tempfile::TempDir;

    use super::*;

    /// A workspace with one Run, and the path of its file.
    fn place() -> (TempDir, OutputsDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        fs::create_dir(&run).unwrap();
        let outputs = OutputsDir::open(root.path(), "run").unwrap();
        (root, outputs, run.join(RESERVED_DIR).join(FILE))
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
        assert!(OutputsDir::open(root.path(), "other").is_err());
    }

    /// C-5.4: what a function wrote is found, or somebody is told that it is not.
    #[tokio::test]
    async fn a_directory_that_was_removed_is_no_empty_one_and_comes_back() {
        let (_root, outputs, path) = place();
        let dir = path.parent().unwrap();
        for again in [false, true] {
            fs::remove_dir_all(dir).unwrap();
            if again {
                fs::create_dir(dir).unwrap();
                fs::write(&path, "a=1").unwrap();
            }
            assert_eq!(outputs.read().await.unwrap(), Left::Removed, "{again}");
            outputs.empty().await.unwrap();
            assert_eq!(outputs.read().await.unwrap(), Left::Nothing);
            fs::write(&path, "b=2").unwrap();
            assert_eq!(outputs.read().await.unwrap(), Left::Bytes(b"b=2".to_vec()));
        }
        fs::remove_dir_all(dir.parent().unwrap()).unwrap();
        assert!(outputs.empty().await.is_err());
    }
}
