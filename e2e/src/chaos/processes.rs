//! Processes of one container, found by the ids of Pod and container in their cgroup, and signals to
//! exactly those: a process id alone may be somebody else's by the time it is used.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};

/// One process, as long as it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its id here.
    pub pid: u32,
    /// Its id in its container; 1 is what the container was started for.
    pub inside: u32,
    /// When it started: with the id, this is nobody else.
    started: u64,
}

/// Every process of a container of a Pod, oldest first.
///
/// # Errors
/// When /proc cannot be listed.
pub fn of(pod_uid: &str, container: &str) -> Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("list /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Who ends while we look is none.
        let Ok(cgroups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else {
            continue;
        };
        if is_in(&cgroups, pod_uid, container)
            && let Some(process) = look(pid)
        {
            found.push(process);
        }
    }
    found.sort_unstable_by_key(|process| process.started);
    Ok(found)
}

// === impl Process ===

impl Process {
    /// Whether it still runs.
    #[must_use]
    pub fn is_there(&self) -> bool {
        look(self.pid).as_ref() == Some(self)
    }

    /// Sends a signal by its name, for example `KILL`; `false` when it has ended.
    ///
    /// # Errors
    /// When it runs and cannot be reached.
    pub fn signal(&self, name: &str) -> Result<bool> {
        if !self.is_there() {
            return Ok(false);
        }
        let sent = run("kill", &[&format!("-{name}"), &self.pid.to_string()]);
        match sent {
            Err(_) if !self.is_there() => Ok(false),
            sent => sent.map(|_| true),
        }
    }

    /// A path as the process sees it.
    #[must_use]
    pub fn root(&self) -> std::path::PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join("root")
    }
}

/// Runs a program to its end; what it printed.
///
/// # Errors
/// When it cannot be run or fails; the text has what it complained of.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn look(pid: u32) -> Option<Process> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    Some(Process {
        pid,
        inside: inside(&read("status")?)?,
        started: started(&read("stat")?)?,
    })
}

/// Whether a line of /proc/PID/cgroup names this container of this Pod.
fn is_in(cgroups: &str, pod_uid: &str, container: &str) -> bool {
    cgroups
        .lines()
        .any(|line| line.contains(&format!("pod{pod_uid}/")) && line.contains(container))
}

/// The innermost id of /proc/PID/status.
fn inside(status: &str) -> Option<u32> {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_whitespace().last()?.parse().ok()
}

/// Field 22 of /proc/PID/stat; `None` for what has ended and only waits to be asked.
fn started(stat: &str) -> Option<u64> {
    // A name may hold blanks and brackets.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!["Z", "X"].contains(&state)).then_some(())?;
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    #[test]
    fn only_the_container_of_that_very_pod_matches() {
        let cgroups = format!(
            "12:cpuset:/krt/kubepods/burstable/pod{UID}/abc123\n0::/krt/kubepods/burstable/pod{UID}/abc123\n"
        );
        assert!(is_in(&cgroups, UID, "abc123"));
        assert!(!is_in(&cgroups, UID, "def456"));
        assert!(!is_in(&cgroups, "2c24c1f0", "abc123"));
        assert!(!is_in("0::/user.slice\n", UID, "abc123"));
    }

    #[test]
    fn ids_and_start_times_are_read_past_odd_names() {
        assert_eq!(inside("Name:\tx\nNSpid:\t4711\t1\nThreads:\t2\n"), Some(1));
        assert_eq!(inside("Name:\tx\n"), None);
        let stat = |state| {
            format!("4711 (a b) c) {state} 1 4711 4711 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 987654 5 6")
        };
        assert_eq!(started(&stat("S")), Some(987_654));
        assert_eq!(started(&stat("Z")), None);
        assert_eq!(started("4711"), None);
    }

    #[test]
    fn a_signal_reaches_the_very_process_and_nobody_after_it() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = look(child.id()).unwrap();
        let earlier = Process {
            started: process.started - 1,
            ..process
        };
        assert!(!earlier.signal("KILL").unwrap(), "another life of that id");
        assert!(process.signal("KILL").unwrap());
        child.wait().unwrap();
        assert!(!process.signal("KILL").unwrap());
    }
}
