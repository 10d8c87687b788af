//! The trampoline `worker-exec`: the server starts itself again in this role, the
//! new process gives up what a function must not have, and becomes the interpreter.
//!
//! Doing this after the fork and before the exec of another program would need
//! unsafe code; a second exec does not. Order matters: `no_new_privs` first (both
//! filters need it), Landlock before seccomp (the filter need not know Landlock).

use std::{
    ffi::OsString,
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::Context as _;
use landlock::{
    ABI, Access as _, AccessFs, BitFlags, Compatible as _, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreated, RulesetCreatedAttr as _, RulesetStatus, Scope,
};
use nix::{
    libc,
    sys::{
        prctl::{set_no_new_privs, set_pdeathsig},
        resource::{Resource, getrlimit, setrlimit},
        signal::Signal,
        stat::{Mode, umask},
    },
    unistd::{getppid, setsid},
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Newest Landlock version whose rights are asked for; older kernels enforce what
/// they know.
const ABI_WANTED: ABI = ABI::V6;

/// Most open files of a worker.
const MAX_FILES: u64 = 4096;

/// The system's usual limit of message queues, bytes.
const MESSAGE_QUEUE_BYTES: u64 = 819_200;

/// What the kernel's out-of-memory killer adds to a worker's score, so that it
/// prefers workers over the server.
const OOM_SCORE_ADJ: i32 = 700;

/// Exit code of a trampoline that could not do its work; the reason is on stderr.
pub const EXIT_FAILED: u8 = 126;

/// The command line of the trampoline.
#[derive(Debug, Clone, clap::Args)]
pub struct ExecArgs {
    /// The server's process id: leave at once if it is gone already.
    #[arg(long)]
    parent: i32,
    /// 0: session, limits and no new privileges; 1: Landlock and seccomp as well.
    #[arg(long, default_value_t = 0)]
    level: u8,
    /// Neither readable nor writable at level 1, unless named below; repeatable.
    #[arg(long)]
    hide: Vec<PathBuf>,
    /// Bytes to take off the limit of message queues, as a mark; see `limit_mark`.
    #[arg(long, default_value_t = 0)]
    mark: u64,
    /// Readable at level 1; repeatable.
    #[arg(long)]
    read: Vec<PathBuf>,
    /// Readable and writable at level 1; repeatable.
    #[arg(long)]
    write: Vec<PathBuf>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What the server asks of the trampoline.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Isolation level: 0 or 1 (C-8.7).
    pub level: u8,
    /// Different for each registration; see [`limit_mark`].
    pub mark: u64,
    /// Paths that stay out of reach.
    pub hide: Vec<PathBuf>,
    /// Paths to read although something above is hidden.
    pub read: Vec<PathBuf>,
    /// Paths to read and write.
    pub write: Vec<PathBuf>,
}

/// The command that starts `program` through the trampoline.
#[must_use]
pub fn command(confinement: &Confinement, program: &Path, args: &[OsString]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg("worker-exec")
        .args(["--parent", &std::process::id().to_string()]);
    command.args([
        "--level",
        &confinement.level.to_string(),
        "--mark",
        &confinement.mark.to_string(),
    ]);
    for (flag, paths) in [
        ("--hide", &confinement.hide),
        ("--read", &confinement.read),
        ("--write", &confinement.write),
    ] {
        for path in paths {
            command.arg(flag).arg(path);
        }
    }
    command.arg("--").arg(program).args(args);
    command
}

/// The limit of message queues, bytes, that every process of the registration with
/// this mark has. Resource limits survive what an environment does not (`env -i`, a
/// new session, a double fork), and a hard limit cannot be raised again: a process
/// may lose the mark only by lowering a limit that hardly anybody knows.
#[must_use]
pub fn limit_mark(mark: u64) -> u64 {
    MESSAGE_QUEUE_BYTES.saturating_sub(mark)
}

/// Becomes the program; returns only when that is impossible.
#[must_use]
pub fn run(args: &ExecArgs) -> ExitCode {
    let Err(error) = confine_and_exec(args);
    eprintln!("worker-exec: {error:#}");
    ExitCode::from(EXIT_FAILED)
}

fn confine_and_exec(args: &ExecArgs) -> anyhow::Result<std::convert::Infallible> {
    // Own session and process group: one signal reaches the whole worker. Fails
    // only for a group leader, which the server never makes of us.
    setsid().context("start a session")?;
    set_pdeathsig(Signal::SIGKILL).context("ask to die with the server")?;
    anyhow::ensure!(getppid().as_raw() == args.parent, "the server is gone");
    set_no_new_privs().context("give up new privileges")?;
    umask(Mode::from_bits_truncate(0o077));
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("switch off core dumps")?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    let files = hard.min(MAX_FILES);
    setrlimit(Resource::RLIMIT_NOFILE, files, files).context("limit open files")?;
    // Best effort, where the limit is lower already: the environment bears the mark too.
    let queues = limit_mark(args.mark);
    let _ = setrlimit(Resource::RLIMIT_MSGQUEUE, queues, queues);
    // Best effort: a Pod may have the highest score already.
    let score = fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok());
    let _ = fs::write(
        "/proc/self/oom_score_adj",
        score.unwrap_or(0).max(OOM_SCORE_ADJ).to_string(),
    );
    if args.level >= 1 {
        restrict_files(args).context("restrict files with Landlock")?;
        restrict_system_calls().context("restrict system calls with seccomp")?;
    }
    let (program, rest) = args.command.split_first().context("no program given")?;
    let error = Command::new(program).args(rest).exec();
    Err(anyhow::Error::new(error).context(format!("run {}", Path::new(program).display())))
}

/// The image is readable, the function's own directories are writable, everything
/// that belongs to other functions or to the server is neither.
fn restrict_files(args: &ExecArgs) -> anyhow::Result<()> {
    let ruleset = Ruleset::default()
        .set_compatibility(landlock::CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI_WANTED))?
        .scope(Scope::from_all(ABI_WANTED))?
        .create()?;
    let read = AccessFs::from_read(ABI_WANTED);
    let mut rules = Rules(ruleset);
    rules.below(Path::new("/"), &args.hide, read)?;
    for path in &args.read {
        rules.allow(path, read)?;
    }
    for path in args
        .write
        .iter()
        .map(PathBuf::as_path)
        .chain([Path::new("/dev/shm")])
    {
        rules.allow(path, AccessFs::from_all(ABI_WANTED))?;
    }
    let device = read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
    for name in ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts"] {
        rules.allow(&Path::new("/dev").join(name), device)?;
    }
    let status = rules.0.restrict_self()?;
    anyhow::ensure!(
        status.ruleset != RulesetStatus::NotEnforced,
        "this kernel does not enforce it"
    );
    Ok(())
}

struct Rules(RulesetCreated);

impl Rules {
    /// Allows everything beneath `path` except what is hidden: where a hidden path
    /// lies deeper, its siblings are allowed one by one.
    fn below(&mut self, path: &Path, hide: &[PathBuf], access: BitFlags<AccessFs>) -> anyhow::Result<()> {
        if hide.iter().any(|hidden| hidden == path) {
            return Ok(());
        }
        if !hide.iter().any(|hidden| hidden.starts_with(path)) && path != Path::new("/") {
            return self.allow(path, access);
        }
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            // A link is no place of its own: its target is allowed where it lies.
            if entry.file_type().is_ok_and(|kind| !kind.is_symlink()) {
                self.below(&entry.path(), hide, access)?;
            }
        }
        Ok(())
    }

    /// Allows one path; one that does not exist or cannot be opened needs no rule.
    fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) -> anyhow::Result<()> {
        let Ok(fd) = PathFd::new(path) else { return Ok(()) };
        let access = if path.is_dir() {
            access
        } else {
            access & AccessFs::from_file(ABI_WANTED)
        };
        (&mut self.0).add_rule(PathBeneath::new(fd, access))?;
        Ok(())
    }
}

/// System calls that a function has no business with. Each answers EPERM.
const DENIED: &[libc::c_long] = &[
    // other processes' memory and descriptors
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // mounts and namespaces
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    // large, rarely needed parts of the kernel
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_fanotify_init,
    // the machine
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

fn restrict_system_calls() -> anyhow::Result<()> {
    let filter = SeccompFilter::new(
        DENIED.iter().map(|&number| (number, Vec::new())).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        std::env::consts::ARCH.try_into()?,
    )?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    Ok(())
}
