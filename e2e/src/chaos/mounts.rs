//! Where a folder that a container sees lies on the node.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::processes::Process;

/// A line of /proc/PID/mountinfo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Kind of file system, for example `tmpfs`.
    pub kind: String,
    device: String,
    root: PathBuf,
    at: PathBuf,
}

/// What a process sees at exactly this path.
///
/// # Errors
/// When nothing is mounted there, or the process has ended.
pub fn mount_of(process: &Process, at: &str) -> Result<Mount> {
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", process.pid))?;
    // What was mounted last is what is seen.
    let mount = parse(&text).into_iter().rfind(|mount| mount.at == Path::new(at));
    mount.with_context(|| format!("nothing is mounted at {at}"))
}

fn parse(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let fields: Vec<&str> = left.split(' ').collect();
        Some(Mount {
            kind: right.split(' ').next()?.to_owned(),
            device: (*fields.get(2)?).to_owned(),
            root: PathBuf::from(*fields.get(3)?),
            at: PathBuf::from(*fields.get(4)?),
        })
    };
    text.lines().filter_map(mount).collect()
}

// === impl Mount ===

impl Mount {
    /// The same folder in our own view of the file system.
    ///
    /// # Errors
    /// When it is not in our view.
    pub fn here(&self) -> Result<PathBuf> {
        let text = fs::read_to_string("/proc/self/mountinfo")?;
        self.among(&parse(&text))
            .with_context(|| format!("{} cannot be seen from here", self.at.display()))
    }

    fn among(&self, ours: &[Self]) -> Option<PathBuf> {
        let (ours, below) = ours
            .iter()
            .filter(|ours| ours.device == self.device)
            .filter_map(|ours| Some((ours, self.root.strip_prefix(&ours.root).ok()?)))
            .max_by_key(|(ours, _)| ours.root.components().count())?;
        Some(if below.as_os_str().is_empty() {
            ours.at.clone()
        } else {
            ours.at.join(below)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_found_on_the_node() {
        let node = parse(
            "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
             40 22 0:50 / /state/pods/UID/volumes/empty-dir/workspace rw - tmpfs tmpfs rw\n",
        );
        let pod = parse(
            "90 80 0:70 / / ro - overlay overlay ro\n\
             91 90 254:0 /state/pods/UID/volumes/empty-dir/journal /var/lib/kruntimes rw master:1 - ext4 /dev/vda rw\n\
             92 90 0:50 / /workspace rw - tmpfs tmpfs rw\n",
        );
        let here = |at: &str| {
            let mount = pod.iter().find(|mount| mount.at == Path::new(at))?;
            mount.among(&node)
        };
        let expected = Path::new("/state/pods/UID/volumes/empty-dir");
        assert_eq!(here("/var/lib/kruntimes"), Some(expected.join("journal")));
        assert_eq!(here("/workspace"), Some(expected.join("workspace")));
        assert_eq!(here("/"), None, "an overlay of its own");
    }
}
