//! Real binaries as child processes that end with the test.

use std::{
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

/// The folder of the built binaries: `KRUNTIMES_BIN`, or `build/bin` of the tree.
#[must_use]
pub fn bin_folder() -> PathBuf {
    std::env::var_os("KRUNTIMES_BIN").map_or_else(|| tree().join("build/bin"), PathBuf::from)
}

/// The root of the source tree.
#[must_use]
pub fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_path_buf)
        .unwrap_or_default()
}

/// A running binary; killed and reaped when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `binary` with its output in a log file below `build/e2e-logs`.
    pub fn start(binary: &str, label: &str, args: &[String], env: &[(&str, String)]) -> Result<Self> {
        let path = bin_folder().join(binary);
        ensure!(path.exists(), "{} is missing: run `make build`", path.display());
        let logs = tree().join("build/e2e-logs");
        fs::create_dir_all(&logs)?;
        let log = logs.join(format!("{label}.log"));
        let file = File::create(&log)?;
        let child = Command::new(&path)
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/tmp")
            .envs(env.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", path.display()))?;
        Ok(Self {
            name: label.to_owned(),
            child,
            log,
        })
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal by its name, for example `TERM`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill")
            .args([&format!("-{name}"), &self.pid().to_string()])
            .status()?;
        ensure!(status.success(), "kill -{name} {} failed", self.name);
        Ok(())
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the end; the exit code, or `None` after a signal.
    pub fn wait(&mut self, patience: Duration) -> Result<Option<i32>> {
        let end = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(
                Instant::now() < end,
                "{} still runs after {patience:?}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A loopback address nobody listens on right now.
pub fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
