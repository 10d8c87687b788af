//! One child that runs a function: started, ended.
//!
//! The child gets one end of a socket pair as its standard input; what it prints
//! goes through two pipes into the log, so printed text and results never mix
//! (C-8.6).

use std::{
    ffi::OsString,
    io,
    os::{
        fd::OwnedFd,
        unix::{fs::DirBuilderExt as _, process::ExitStatusExt as _},
    },
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{Arc, mpsc},
    time::Duration,
};

use kruntimes_proto::{limits, local::LocalStream};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{process::Child, sync::oneshot};
use tracing::{info, warn};

use super::{
    exec::{self, Confinement},
    logs::Logs,
    sweep::{Children, Mark},
    wire::{Speech, Wire},
};

/// How long a killed process may take to leave before we stop waiting for it.
const REAP_BOUND: Duration = Duration::from_secs(5);

/// Everything needed to start a worker, as often as it takes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// For the log.
    pub run_uid: String,
    /// The interpreter, absolute.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How it speaks.
    pub speech: Speech,
    /// The whole environment; nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Where it starts.
    pub working_dir: PathBuf,
    /// What the trampoline takes away.
    pub confinement: Confinement,
    /// `NAME=value` in `env` by which its processes are found again.
    pub mark_in_env: String,
    /// For its temporary files; removed with the registration.
    pub private: PathBuf,
}

impl Plan {
    /// Makes the private directory, or finds it again.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn create_private(&self) -> io::Result<()> {
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&self.private)
    }

    /// Removes the private directory. Blocking.
    pub fn remove_private(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.private)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(run_uid = self.run_uid, %error, "cannot remove a function's temporary files");
        }
    }
}

/// What is known of a worker after its end.
#[derive(Debug)]
pub struct Remains {
    /// How it ended.
    pub gone: Gone,
    last_line: String,
}

impl Remains {
    /// The last line it printed, for the reason of a failed start.
    #[must_use]
    pub fn last_words(&self) -> String {
        if self.last_line.is_empty() {
            "it printed nothing".to_owned()
        } else {
            format!("its last line: {}", limits::clip(&self.last_line, 1024))
        }
    }
}

/// Starts workers from one thread that lasts as long as the server: a child's
/// parent-death signal comes when the *thread* that started it ends.
#[derive(Debug, Clone)]
pub struct Spawner {
    jobs: mpsc::Sender<Job>,
    children: Children,
}

#[derive(Debug)]
struct Job {
    command: std::process::Command,
    reply: oneshot::Sender<io::Result<Child>>,
}

impl Spawner {
    /// Starts the thread; it ends with the last clone. Must be called inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(children: Children) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let runtime = tokio::runtime::Handle::current();
        let known = children.clone();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || {
                let _inside = runtime.enter();
                while let Ok(job) = queue.recv() {
                    let mut known = known.lock();
                    let child = tokio::process::Command::from(job.command)
                        .kill_on_drop(true)
                        .spawn();
                    if let Some(pid) = child.as_ref().ok().and_then(Child::id) {
                        known.insert(pid.cast_signed());
                    }
                    drop(known);
                    // Nobody waits any more: the child is dropped, and thereby killed.
                    let _ = job.reply.send(child);
                }
            })?;
        Ok(Self { jobs, children })
    }

    async fn spawn(&self, command: std::process::Command) -> io::Result<Child> {
        let (reply, answer) = oneshot::channel();
        let gone = || io::Error::other("the spawner thread is gone");
        self.jobs.send(Job { command, reply }).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    /// Waits for its end.
    pub exit: Exit,
    /// The conversation with it.
    pub wire: Wire,
    /// What it prints.
    pub logs: Logs,
}

impl Worker {
    /// Starts one. It is ready only when it says so in its first frame.
    ///
    /// # Errors
    /// When the system has no room for another process, or the working directory
    /// is gone.
    pub async fn spawn(plan: &Arc<Plan>, spawner: &Spawner) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        let (stdout, child_stdout) = io::pipe()?;
        let (stderr, child_stderr) = io::pipe()?;
        let mut command = exec::command(&plan.confinement, &plan.program, &plan.args);
        command
            .env_clear()
            .envs(plan.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&plan.working_dir)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(child_stdout))
            .stderr(Stdio::from(child_stderr));
        let child = spawner.spawn(command).await?;
        let pid = child.id().map_or(0, u32::cast_signed);
        Ok(Self {
            exit: Exit {
                child,
                pid,
                plan: Arc::clone(plan),
                children: spawner.children.clone(),
            },
            wire: Wire::new(LocalStream::new(ours)?, plan.speech, plan.private.clone()),
            logs: Logs::new(&plan.run_uid, stdout.into(), stderr.into())?,
        })
    }

    /// Ends it and everything it started; returns when they are gone.
    pub async fn kill(mut self) -> Remains {
        self.exit.signal();
        let gone = tokio::time::timeout(REAP_BOUND, self.exit.wait())
            .await
            .unwrap_or(Gone::Unknown);
        self.exit.sweep().await;
        self.logs.drain();
        self.logs.flush();
        Remains {
            gone,
            last_line: self.logs.last_line().to_owned(),
        }
    }
}

/// The child as a process.
#[derive(Debug)]
pub struct Exit {
    child: Child,
    pid: i32,
    plan: Arc<Plan>,
    children: Children,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// By itself, with this code.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Nobody knows.
    Unknown,
}

impl From<ExitStatus> for Gone {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => match Signal::try_from(*number) {
                Ok(Signal::SIGKILL) => f.write_str("was killed by SIGKILL (by itself, or out of memory)"),
                Ok(signal) => write!(f, "was killed by {}", signal.as_str()),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
            Self::Unknown => f.write_str("ended in an unknown way"),
        }
    }
}

impl Exit {
    /// Waits for the end. Cancel safe.
    pub async fn wait(&mut self) -> Gone {
        let gone = self.child.wait().await.map_or(Gone::Unknown, Gone::from);
        self.children.lock().remove(&self.pid);
        gone
    }

    /// Kills the process group, and the process itself in case it has not made a
    /// group yet.
    fn signal(&self) {
        if self.pid > 0 {
            let _ = kill(Pid::from_raw(-self.pid), Signal::SIGKILL);
            if self.child.id().is_some() {
                let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
            }
        }
    }

    /// Ends what the group did not reach.
    async fn sweep(&self) {
        let mark = Mark {
            session: self.pid,
            environment: self.plan.mark_in_env.clone(),
            limit: exec::limit_mark(self.plan.confinement.mark),
        };
        let children = self.children.clone();
        let swept = tokio::task::spawn_blocking(move || children.sweep(&mark)).await;
        match swept {
            Ok(0) => {}
            Ok(processes) => info!(
                run_uid = self.plan.run_uid,
                processes, "ended processes that a function left behind"
            ),
            Err(error) => warn!(run_uid = self.plan.run_uid, %error, "cannot look for left processes"),
        }
    }
}
