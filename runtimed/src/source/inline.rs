//! Inline text → a file below the Run's own directory.
//!
//! Every step is taken relative to an open directory and follows no symbolic link, so that nothing a
//! function left behind can lead a write or a removal out of the directory.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use kruntimes_api::{Run, keys::RunUid};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open, openat},
    sys::stat::{Mode, mkdirat},
};

use super::{SourceError, clear::clear};
use crate::outputs::{OutputsDir, RESERVED_DIR};

/// Who may read what is prepared: the server runs as the same user, neighbours' workers may too.
const DIR_MODE: u32 = 0o750;

/// Longest path, bytes, as in the CRD.
const PATH_MAX: usize = 4096;

/// The directory that holds one directory a Run.
#[derive(Debug, Clone)]
pub struct Workspace {
    root: PathBuf,
}

// === impl Workspace ===

impl Workspace {
    /// `root` is `--workspace`; it must exist.
    ///
    /// # Errors
    /// When it is not a directory; the text names the flag.
    pub fn new(root: &Path) -> io::Result<Self> {
        let context = |error: io::Error| {
            io::Error::new(error.kind(), format!("--workspace {}: {error}", root.display()))
        };
        let root = root.canonicalize().map_err(context)?;
        if !root.is_dir() {
            return Err(context(io::Error::from(io::ErrorKind::NotADirectory)));
        }
        Ok(Self { root })
    }

    /// Where the code of a Run is.
    #[must_use]
    pub fn dir(&self, run: RunUid) -> PathBuf {
        self.root.join(run.to_string())
    }

    /// Makes the directory of the Run anew and puts its source there. Blocks.
    ///
    /// # Errors
    /// When the source is not acceptable or the file system refuses.
    pub fn prepare(&self, uid: RunUid, run: &Run) -> Result<PathBuf, SourceError> {
        let source = run.spec.source.clone().unwrap_or_default();
        if source.repo_url.is_some() {
            return Err(SourceError::Unsupported);
        }
        self.remove(uid)?;
        let dir = self.dir(uid);
        fs::DirBuilder::new().mode(DIR_MODE).create(&dir)?;
        if let Some(text) = &source.inline {
            // A task has no path of its own; nothing here runs one yet.
            let path = source.inline_path.as_deref().unwrap_or("main");
            write_beneath(&dir, path, text.as_bytes())?;
        }
        Ok(dir)
    }

    /// Makes and opens the place of the Run's outputs. Blocks.
    ///
    /// # Errors
    /// When the file system refuses, or the Run has no directory.
    pub fn outputs(&self, uid: RunUid) -> io::Result<OutputsDir> {
        OutputsDir::open(&self.root, &uid.to_string())
    }

    /// Removes the directory of the Run and all in it, if it exists. Blocks.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn remove(&self, uid: RunUid) -> io::Result<()> {
        clear(&self.root, OsStr::new(&uid.to_string()))
    }
}

/// The segments of a relative path that stays where it begins.
///
/// # Errors
/// [`SourceError::Path`].
pub fn segments(path: &str) -> Result<Vec<&str>, SourceError> {
    let segments: Vec<_> = path.split('/').collect();
    let bad = |segment: &&str| matches!(*segment, "" | "." | "..") || segment.bytes().any(|byte| byte < 0x20);
    if path.len() > PATH_MAX || segments.iter().any(bad) {
        return Err(SourceError::Path);
    }
    Ok(segments)
}

fn write_beneath(dir: &Path, path: &str, bytes: &[u8]) -> Result<(), SourceError> {
    let mut segments = segments(path)?;
    if segments.first() == Some(&RESERVED_DIR) {
        return Err(SourceError::Reserved);
    }
    let Some(name) = segments.pop() else {
        return Err(SourceError::Path);
    };
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mode = Mode::from_bits_truncate(DIR_MODE);
    let mut parent = open(dir, flags, Mode::empty()).map_err(io::Error::from)?;
    for segment in segments {
        match mkdirat(&parent, segment, mode) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        parent = openat(&parent, segment, flags, Mode::empty()).map_err(io::Error::from)?;
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = openat(&parent, name, flags, Mode::from_bits_truncate(0o640)).map_err(io::Error::from)?;
    File::from(file).write_all(bytes)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use kruntimes_api::{fixtures, run::Source};
    use proptest::prelude::*;

    use super::*;

    fn with_source(source: Source) -> (RunUid, Run) {
        let run = fixtures::run("ns", "n")
            .with(|run| run.spec.source = Some(source))
            .build();
        (run.run_uid().unwrap(), run)
    }

    fn inline(path: &str) -> Source {
        Source {
            inline: Some("text".to_owned()),
            inline_path: Some(path.to_owned()),
            ..Source::default()
        }
    }

    #[test]
    fn the_text_is_where_the_path_says() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        let (uid, run) = with_source(inline("pkg/inner/main.py"));
        let dir = workspace.prepare(uid, &run).unwrap();
        assert_eq!(fs::read_to_string(dir.join("pkg/inner/main.py")).unwrap(), "text");
        workspace.prepare(uid, &run).unwrap();
        workspace.remove(uid).unwrap();
        workspace.remove(uid).unwrap();
        assert!(!dir.exists());
    }

    #[test]
    fn without_a_source_there_is_only_the_place_of_outputs() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        let (uid, run) = with_source(Source::default());
        let dir = workspace.prepare(uid, &run).unwrap();
        workspace.outputs(uid).unwrap();
        let mut names = fs::read_dir(dir).unwrap().map(|it| it.unwrap().file_name());
        assert_eq!(names.next().unwrap(), RESERVED_DIR);
        assert!(names.next().is_none());
    }

    #[test]
    fn no_source_lies_in_the_platform_s_directory() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        for path in [".kruntimes", ".kruntimes/outputs"] {
            let (uid, run) = with_source(inline(path));
            assert!(matches!(workspace.prepare(uid, &run), Err(SourceError::Reserved)));
        }
    }

    #[test]
    fn no_path_leads_out() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        for path in [
            "../x",
            "/x",
            "a/../../x",
            "a//x",
            "./x",
            "",
            "a/",
            "a/\nx",
            &"a/".repeat(3000),
        ] {
            let (uid, run) = with_source(inline(path));
            assert!(
                matches!(workspace.prepare(uid, &run), Err(SourceError::Path)),
                "{path}"
            );
        }
        assert!(!root.path().join("x").exists());
    }

    #[test]
    fn a_link_is_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        fs::create_dir(&dir).unwrap();
        symlink(outside.path(), dir.join("pkg")).unwrap();
        assert!(write_beneath(&dir, "pkg/main.py", b"text").is_err());
        symlink(outside.path().join("main.py"), dir.join("main.py")).unwrap();
        assert!(write_beneath(&dir, "main.py", b"text").is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn removing_follows_no_link_and_opens_what_was_closed() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("kept"), "").unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        let (uid, run) = with_source(inline("main.py"));
        let dir = workspace.prepare(uid, &run).unwrap();
        symlink(outside.path(), dir.join("link")).unwrap();
        fs::create_dir_all(dir.join("closed/inner")).unwrap();
        fs::set_permissions(dir.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
        // As root nothing is closed; as anybody else this needs the second attempt.
        workspace.remove(uid).unwrap();
        assert!(!dir.exists() && outside.path().join("kept").exists());
    }

    #[test]
    fn a_repository_is_refused_and_not_ignored() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(root.path()).unwrap();
        let (uid, run) = with_source(Source {
            repo_url: Some("https://example.com/x".to_owned()),
            ..Source::default()
        });
        assert!(matches!(
            workspace.prepare(uid, &run),
            Err(SourceError::Unsupported)
        ));
    }

    proptest! {
        #[test]
        fn accepted_paths_stay_beneath(path in "[a./]{0,12}") {
            if let Ok(segments) = segments(&path) {
                prop_assert!(segments.iter().all(|it| !it.is_empty() && *it != "." && *it != ".."));
            }
        }
    }
}
