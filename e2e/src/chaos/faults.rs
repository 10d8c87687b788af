//! Breaks one thing.

use std::{
    fs::File,
    io::{ErrorKind, Write as _},
    path::Path,
};

use anyhow::{Context as _, Result, bail};

use super::{
    mounts::mount_of,
    plan::{Fault, Process as Kind, Volume},
    processes::{Process, run},
    targets::{Target, Targets},
    undo::{FILLER, Id, Undo, Undos, copy},
};

const JOURNAL: &str = "/var/lib/kruntimes";
const WORKSPACE: &str = "/workspace";
/// Size of the disk that stands in for a journal's; records are a few KiB each.
const SMALL_DISK: &str = "size=1m,mode=0777,uid=65532,gid=65532";
/// A disk larger than this is no small one that a test may fill.
const MOST_FILLED: u64 = 64 * 1024 * 1024;

/// What was broken.
#[derive(Debug)]
pub struct Broken {
    /// Pod and process, for people.
    pub what: String,
    /// How it is healed; `None` for what Kubernetes heals.
    pub undo: Option<Id>,
}

/// Breaks something of one of the Pods there are, chosen by `dice`; `None` when there is no victim now.
///
/// # Errors
/// When a victim was found and is not broken.
pub async fn make(fault: Fault, dice: usize, targets: &Targets, undos: &Undos) -> Result<Option<Broken>> {
    let role = match fault {
        Fault::Kill(process) | Fault::Freeze(process) => process.role(),
        Fault::Cut(role) | Fault::Delete { of: role, .. } => role,
        Fault::Fill(_) => Kind::Runtimed.role(),
    };
    let pods = targets.running(role).await?;
    if pods.is_empty() {
        return Ok(None);
    }
    let pod = &pods[dice % pods.len()];
    let broken = match fault {
        Fault::Delete { grace, .. } => {
            let deleted = targets.delete(pod, grace).await?;
            deleted.then(|| (pod.name.clone(), None))
        }
        Fault::Kill(kind) => match pod.process(kind, dice)? {
            Some(process) if process.signal("KILL")? => Some((named(pod, &process), None)),
            _ => None,
        },
        Fault::Freeze(kind) => match pod.process(kind, dice)? {
            Some(process) => {
                let id = undos.breaking(Undo::Continue(process), || process.signal("STOP").map(drop))?;
                Some((named(pod, &process), Some(id)))
            }
            None => None,
        },
        Fault::Cut(_) => match pod.anyone()? {
            Some(process) => {
                let link = link(&process)?;
                let id = undos.breaking(Undo::Forward(link.clone()), || {
                    run("bridge", &["link", "set", "dev", &link, "state", "0"]).map(drop)
                })?;
                Some((format!("{} ({link})", pod.name), Some(id)))
            }
            None => None,
        },
        Fault::Fill(volume) => match pod.process(Kind::Runtimed, dice)? {
            Some(process) => {
                let id = match volume {
                    Volume::Journal => cover_journal(process, undos)?,
                    Volume::Workspace => fill_workspace(&process, undos)?,
                };
                id.map(|id| (pod.name.clone(), Some(id)))
            }
            None => None,
        },
    };
    Ok(broken.map(|(what, undo)| Broken { what, undo }))
}

fn named(pod: &Target, process: &Process) -> String {
    format!("{} (process {})", pod.name, process.pid)
}

// === networks ===

/// The node's end of the Pod's network: a port of the bridge that all Pods are on.
fn link(process: &Process) -> Result<String> {
    let pid = process.pid.to_string();
    let inside = run(
        "nsenter",
        &["-t", &pid, "-n", "--", "ip", "-o", "link", "show", "dev", "eth0"],
    )?;
    let peer = peer(&inside).context("eth0 of the Pod has no other end")?;
    let here = run("ip", &["-o", "link"])?;
    named_link(&here, peer).context("the other end of the Pod's eth0 is not on this node")
}

/// `2: eth0@if7: …` → 7.
fn peer(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once("@if")?;
    rest.split_once(':')?.0.parse().ok()
}

/// The name of the link with this number in `7: veth0@if2: …`.
fn named_link(lines: &str, number: u32) -> Option<String> {
    let start = format!("{number}: ");
    let line = lines.lines().find_map(|line| line.strip_prefix(&start))?;
    let name = line.split_once(':')?.0;
    Some(name.split_once('@').map_or(name, |(name, _)| name).to_owned())
}

// === disks ===

/// A small and full disk with the same files takes the place of the journal's, which is the node's own
/// and must not be filled. `None` when that is so already.
fn cover_journal(process: Process, undos: &Undos) -> Result<Option<Id>> {
    let mount = mount_of(&process, JOURNAL)?;
    if mount.kind == "tmpfs" {
        return Ok(None);
    }
    let volume = mount.here()?;
    let undo = Undo::Uncover {
        process,
        at: JOURNAL,
        volume: volume.clone(),
    };
    let pid = process.pid.to_string();
    // It must not write between copy and cover.
    if !process.signal("STOP")? {
        return Ok(None);
    }
    let covered = undos.breaking(undo, || {
        let mount = [
            "-t", &pid, "-m", "--", "mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", JOURNAL,
        ];
        run("nsenter", &mount)?;
        let at = process.root().join(JOURNAL.trim_start_matches('/'));
        copy(&volume, &at)?;
        fill(&at)
    });
    process.signal("CONT")?;
    covered.map(Some)
}

/// The workspace of these Pods is a small disk of its own. `None` when it is full already.
fn fill_workspace(process: &Process, undos: &Undos) -> Result<Option<Id>> {
    let mount = mount_of(process, WORKSPACE)?;
    if mount.kind != "tmpfs" {
        bail!("{WORKSPACE} is on the node's own disk, which must not be filled");
    }
    let volume = mount.here()?;
    if volume.join(FILLER).exists() {
        return Ok(None);
    }
    let undo = Undo::Remove(volume.join(FILLER));
    undos.breaking(undo, || fill(&volume)).map(Some)
}

/// Writes until there is no room.
fn fill(folder: &Path) -> Result<()> {
    let path = folder.join(FILLER);
    let context = || format!("write {}", path.display());
    let mut file = File::create(&path).with_context(context)?;
    let mut written = 0;
    while written < MOST_FILLED {
        match file.write(&[0; 4096]) {
            Ok(bytes) => written += bytes as u64,
            Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
            Err(error) => return Err(error).with_context(context),
        }
    }
    bail!("{} is not full after {MOST_FILLED} bytes", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_end_of_a_pods_network_is_found() {
        let inside = "2: eth0@if7: <BROADCAST,UP> mtu 1500 qdisc noqueue state UP \\    link/ether 00";
        assert_eq!(peer(inside), Some(7));
        assert_eq!(peer("2: eth0: <BROADCAST>"), None);
        let here = "1: lo: <LOOPBACK>\n7: veth0a@if2: <UP>\n17: cni0: <UP>\n";
        assert_eq!(named_link(here, 7).as_deref(), Some("veth0a"));
        assert_eq!(named_link(here, 17).as_deref(), Some("cni0"));
        assert_eq!(named_link(here, 2), None);
    }
}
