//! Finds and ends processes that a worker left behind (C-8.6), and reaps orphans.
//!
//! Killing the process group misses children that made a session of their own. They
//! are known by one of three things they inherit: the worker's session, a mark in the
//! environment, a mark in a resource limit. The server is the reaper of its descendants, so orphans become its
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

    /// Ends every process that `mark` recognises, and reaps what becomes ours.
    /// Returns how many were ended. Blocking, some milliseconds.
    pub fn sweep(&self, mark: &Mark) -> usize {
        let mut ended = HashSet::new();
        for _ in 0..MAX_ROUNDS {
            let mut alive = 0;
            let table: Vec<Process> = processes().collect();
            for process in &table {
                if !process.zombie && mark.is_on(process, &table) {
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

/// By what the processes of one worker are recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The worker's session.
    pub session: i32,
    /// `NAME=value` in the environment.
    pub environment: String,
    /// The hard limit of message queues, bytes.
    pub limit: u64,
}

impl Mark {
    fn is_on(&self, process: &Process, table: &[Process]) -> bool {
        let file = |name: &str| fs::read(format!("/proc/{}/{name}", process.pid)).unwrap_or_default();
        process.session == self.session
            || file("environ")
                .split(|&byte| byte == 0)
                .any(|entry| entry == self.environment.as_bytes())
            // Another server on this machine counts its registrations as we do.
            || (descends(process, Pid::this().as_raw(), table)
                && message_queue_limit(&file("limits")) == Some(self.limit))
    }
}

/// Whether `ancestor` is above `process`, or was when the table was read.
fn descends(process: &Process, ancestor: i32, table: &[Process]) -> bool {
    let mut parent = process.parent;
    for _ in 0..table.len() {
        if parent == ancestor {
            return true;
        }
        match table.iter().find(|process| process.pid == parent) {
            Some(next) => parent = next.parent,
            None => return false,
        }
    }
    false
}

/// The hard limit in a line such as `Max msgqueue size  819200  819200  bytes`.
fn message_queue_limit(limits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(limits).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Max msgqueue size"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
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
    fn the_limit_is_read_from_its_own_line() {
        let own = fs::read("/proc/self/limits").unwrap();
        let (_, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MSGQUEUE).unwrap();
        assert_eq!(message_queue_limit(&own), Some(hard));
        assert_eq!(
            message_queue_limit(b"Max msgqueue size  1  unlimited  bytes\n"),
            None
        );
    }

    #[test]
    fn descent_is_followed_and_ends_at_a_gap_or_a_circle() {
        let process = |pid, parent| Process {
            pid,
            parent,
            session: 0,
            zombie: false,
        };
        let table = [
            process(1, 0),
            process(5, 1),
            process(6, 5),
            process(7, 99),
            process(8, 9),
            process(9, 8),
        ];
        assert!(descends(&table[2], 1, &table));
        assert!(descends(&table[2], 5, &table));
        assert!(!descends(&table[2], 7, &table));
        assert!(!descends(&table[3], 1, &table));
        assert!(!descends(&table[4], 1, &table));
    }

    #[test]
    fn this_process_is_found_with_its_session() {
        let me = Pid::this().as_raw();
        let found = processes().find(|process| process.pid == me).unwrap();
        assert_eq!(found.session, nix::unistd::getsid(None).unwrap().as_raw());
        assert!(!found.zombie);
    }
}
