//! Finds and ends processes that a worker left behind (C-8.6), and reaps orphans.
//!
//! Killing the process group misses children that made a session of their own. They
//! keep the mark in their environment, or at least the worker's session, until they
//! have ended. The server is the reaper of its descendants, so orphans become its
//! children; it waits for each by its own id, never for "any child", which would
//! steal the exit status of a worker.

use std::{
    collections::HashSet,
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};

/// Rounds after which a sweep gives up on a worker that forks faster than we look.
const MAX_ROUNDS: usize = 200;

/// Process ids of workers whose exit somebody waits for.
#[derive(Debug, Clone, Default)]
pub struct Children(Arc<Mutex<HashSet<i32>>>);

impl Children {
    /// Locked: held while a worker is started, so that it cannot be taken for an orphan.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashSet<i32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaps every orphan that has ended. Blocking, some milliseconds.
    pub fn reap_orphans(&self) {
        let me = Pid::this().as_raw();
        let workers = self.lock();
        for process in processes() {
            if process.parent == me && process.zombie && !workers.contains(&process.pid) {
                let _ = waitpid(Pid::from_raw(process.pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }

    /// Ends every process of the worker whose session is `session` or whose
    /// environment holds `mark`, and reaps what becomes ours. Returns how many were
    /// ended. Blocking, some milliseconds.
    pub fn sweep(&self, session: i32, mark: &str) -> usize {
        let mut ended = HashSet::new();
        for _ in 0..MAX_ROUNDS {
            let mut alive = 0;
            for process in processes() {
                if !process.zombie && (process.session == session || has_mark(process.pid, mark)) {
                    let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
                    ended.insert(process.pid);
                    alive += 1;
                }
            }
            self.reap_orphans();
            if alive == 0 {
                break;
            }
            // Killed processes need a moment to go; nothing tells when a stranger has.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        ended.len()
    }
}

/// One line of the process table.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    parent: i32,
    session: i32,
    zombie: bool,
}

fn processes() -> impl Iterator<Item = Process> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
        })
}

/// Reads `/proc/<pid>/stat`; the name in parentheses may hold anything.
fn parse_stat(pid: i32, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let _group = fields.next()?;
    let session = fields.next()?.parse().ok()?;
    Some(Process {
        pid,
        parent,
        session,
        zombie: matches!(state, "Z" | "X"),
    })
}

fn has_mark(pid: i32, mark: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|&byte| byte == 0)
            .any(|entry| entry == mark.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_cannot_forge_the_other_fields() {
        let stat = "42 (a) R 1 1 1 (x) S 7 8 9 0 -1 4194304";
        let read = parse_stat(42, stat).unwrap();
        assert_eq!(
            read,
            Process {
                pid: 42,
                parent: 7,
                session: 9,
                zombie: false
            }
        );
        assert!(parse_stat(1, "1 (x) Z 0 1 1 0").unwrap().zombie);
        assert_eq!(parse_stat(1, "garbage"), None);
    }

    #[test]
    fn this_process_is_found_with_its_session() {
        let me = Pid::this().as_raw();
        let found = processes().find(|process| process.pid == me).unwrap();
        assert_eq!(found.session, nix::unistd::getsid(None).unwrap().as_raw());
        assert!(!found.zombie);
    }
}
