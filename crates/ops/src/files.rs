//! Did a mounted file change: named files of one directory, compared by content.
//!
//! The kubelet publishes a volume by swapping a symbolic link to a directory. Watching inodes
//! misses that on some file systems, so files are read every two seconds; they are small.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::watch, time::MissedTickBehavior};

use crate::drain::Drain;

/// How often a directory is read. Certificates must be in use within ten seconds (C-3.12).
pub const POLL: Duration = Duration::from_secs(2);

/// No watched file is larger; a ConfigMap or Secret may hold 1 MiB in all.
pub const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// How the kubelet links to the current version of a volume.
const VERSION_LINK: &str = "..data";

/// How often a changing directory is read again.
const TRIES: usize = 3;

/// The files that exist, by name. Debug prints names and sizes, never content.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Contents(BTreeMap<&'static str, Vec<u8>>);

/// Named files of one directory.
#[derive(Debug, Clone)]
pub struct WatchedDir {
    dir: PathBuf,
    names: &'static [&'static str],
}

// === impl Contents ===

impl Contents {
    /// Bytes of a file, if it exists.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// A file as text without surrounding white space; `None` if absent, empty or not UTF-8.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        let text = std::str::from_utf8(self.get(name)?).ok()?.trim();
        (!text.is_empty()).then_some(text)
    }

    /// Whether none of the files exists.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.0.iter().map(|(name, bytes)| (name, bytes.len())))
            .finish()
    }
}

// === impl WatchedDir ===

impl WatchedDir {
    /// Nothing is read yet; neither the directory nor the files need to exist.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, names: &'static [&'static str]) -> Self {
        Self {
            dir: dir.into(),
            names,
        }
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Reads all files, as of one instant. A mounted volume has one: the directory that its link
    /// [`VERSION_LINK`] names never changes, so all files come from there. Elsewhere it reads until
    /// two readings agree.
    ///
    /// # Errors
    /// When a file exists but cannot be read, is too large or no regular file, or when the
    /// directory keeps changing. The text names the file, never its content.
    pub fn read(&self) -> io::Result<Contents> {
        let mut before = self.read_version()?;
        for _ in 0..TRIES {
            let after = self.read_version()?;
            if after == before {
                return Ok(after.1);
            }
            before = after;
        }
        Err(io::Error::other(format!(
            "{}: changes while being read",
            self.dir.display()
        )))
    }

    /// The version that is linked to, and its files. A version that is removed meanwhile is not the
    /// one that is linked to afterwards.
    fn read_version(&self) -> io::Result<(Option<PathBuf>, Contents)> {
        let version = fs::read_link(self.dir.join(VERSION_LINK)).ok();
        let contents = self.read_from(
            &version
                .as_ref()
                .map_or_else(|| self.dir.clone(), |it| self.dir.join(it)),
        )?;
        Ok((version, contents))
    }

    fn read_from(&self, dir: &Path) -> io::Result<Contents> {
        let mut contents = BTreeMap::new();
        for name in self.names {
            let path = dir.join(name);
            match read_bounded(&path) {
                Ok(bytes) => {
                    contents.insert(*name, bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let text = format!("{}: {error}", self.dir.join(name).display());
                    return Err(io::Error::new(error.kind(), text));
                }
            }
        }
        Ok(Contents(contents))
    }

    /// Reads now, and then every [`POLL`] as a background task; the receiver has each new content.
    /// What cannot be read counts as unchanged and is logged once.
    pub fn watch(self, name: &'static str, drain: &Drain) -> watch::Receiver<Arc<Contents>> {
        let first = self.read().unwrap_or_else(|error| {
            tracing::warn!(%error, "a watched file cannot be read");
            Contents::default()
        });
        let (sender, receiver) = watch::channel(Arc::new(first));
        drain.spawn_background(name, async move {
            let mut complaint = Once::default();
            poll(self, move |read| match read {
                Ok(contents) => {
                    complaint.clear();
                    sender.send_if_modified(|known| {
                        let changed = **known != contents;
                        if changed {
                            *known = Arc::new(contents);
                        }
                        changed
                    });
                }
                Err(error) => {
                    complaint.warn("a watched file cannot be read", &error.to_string());
                }
            })
            .await;
        });
        receiver
    }
}

/// Reads `dir` every [`POLL`], for ever, beginning one period from now.
pub(crate) async fn poll(dir: WatchedDir, mut each: impl FnMut(io::Result<Contents>)) {
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let dir = dir.clone();
        let read = tokio::task::spawn_blocking(move || dir.read()).await;
        each(read.unwrap_or_else(|error| Err(io::Error::other(error))));
    }
}

/// Warns about the same thing once, until it is over.
#[derive(Debug, Default)]
pub(crate) struct Once(Option<String>);

// === impl Once ===

impl Once {
    pub(crate) fn warn(&mut self, message: &str, error: &str) {
        if self.0.as_deref() != Some(error) {
            tracing::warn!(%error, "{message}");
            self.0 = Some(error.to_owned());
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    // Checked before opening: opening a pipe would wait for its writer.
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("is no regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("has more than {MAX_FILE_BYTES} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    fn dir(path: &Path) -> WatchedDir {
        WatchedDir::new(path, &["a", "b"])
    }

    #[test]
    fn absent_is_absent_and_not_an_error() {
        let temp = tempfile::tempdir().expect("a directory");
        assert!(dir(&temp.path().join("none")).read().expect("read").is_empty());
        fs::write(temp.path().join("a"), " text\n").expect("write");
        let contents = dir(temp.path()).read().expect("read");
        assert_eq!(contents.text("a"), Some("text"));
        assert_eq!(contents.get("b"), None);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let temp = tempfile::tempdir().expect("a directory");
        fs::create_dir(temp.path().join("a")).expect("mkdir");
        let error = dir(temp.path()).read().expect_err("no file").to_string();
        assert!(error.contains("/a: is no regular file"), "{error}");
        fs::remove_dir(temp.path().join("a")).expect("rmdir");
        let large = usize::try_from(MAX_FILE_BYTES).expect("small") + 1;
        fs::write(temp.path().join("a"), vec![b'x'; large]).expect("write");
        let error = dir(temp.path()).read().expect_err("large").to_string();
        assert!(error.contains("more than 1048576 bytes"), "{error}");
    }

    #[test]
    fn debug_prints_no_content() {
        let temp = tempfile::tempdir().expect("a directory");
        fs::write(temp.path().join("a"), "very secret").expect("write");
        let text = format!("{:?}", dir(temp.path()).read().expect("read"));
        assert_eq!(text, r#"{"a": 11}"#);
    }

    /// As the kubelet does it: files are links through `..data`, which is replaced by renaming.
    #[test]
    fn a_swapped_link_never_shows_a_mixture() {
        let temp = tempfile::tempdir().expect("a directory");
        let root = temp.path();
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(root.join(version)).expect("mkdir");
            for name in ["a", "b"] {
                fs::write(root.join(version).join(name), text).expect("write");
            }
        }
        symlink("..1", root.join("..data")).expect("link");
        for name in ["a", "b"] {
            symlink(format!("..data/{name}"), root.join(name)).expect("link");
        }
        let done = AtomicBool::new(false);
        let mut read = 0;
        std::thread::scope(|scope| {
            // Also when an assertion fails: nobody waits for a thread that swaps for ever.
            let _done = SetOnDrop(&done);
            scope.spawn(|| {
                let mut versions = ["..2", "..1"].iter().cycle();
                while !done.load(Ordering::Relaxed) {
                    let version = versions.next().expect("a cycle");
                    symlink(version, root.join("..next")).expect("link");
                    fs::rename(root.join("..next"), root.join("..data")).expect("swap");
                    std::thread::yield_now();
                }
            });
            for _ in 0..20_000 {
                // Changing without a pause is an error, and a mixture would be a lie.
                if let Ok(contents) = dir(root).read() {
                    assert_eq!(contents.get("a"), contents.get("b"));
                    read += 1;
                }
            }
        });
        assert!(read > 0, "no reading succeeded");
    }

    struct SetOnDrop<'a>(&'a AtomicBool);

    impl Drop for SetOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_published_and_an_unchanged_file_is_not() {
        let temp = tempfile::tempdir().expect("a directory");
        let drain = Drain::new();
        let mut changes = dir(temp.path()).watch("test", &drain);
        assert!(changes.borrow_and_update().is_empty());
        fs::write(temp.path().join("a"), "one").expect("write");
        changes.changed().await.expect("published");
        assert_eq!(changes.borrow_and_update().text("a"), Some("one"));
        fs::write(temp.path().join("a"), "one").expect("the same");
        let quiet = tokio::time::timeout(POLL * 5, changes.changed()).await;
        assert!(quiet.is_err(), "nothing changed");
        fs::remove_file(temp.path().join("a")).expect("remove");
        changes.changed().await.expect("published");
        assert!(changes.borrow().is_empty());
    }
}
