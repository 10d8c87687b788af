//! Processor time of the processes on this node, by what they are.

use std::{collections::BTreeMap, fs, path::Path};

/// Programs whose time is told apart; everything else is `others`.
const PROGRAMS: [(&str, &str); 9] = [
    ("kruntimes-gateway", "gateway"),
    ("kruntimes-runtimed", "runtimed"),
    ("kruntimes-runtime-server", "runtime-server"),
    ("python3", "worker"),
    ("kruntimes-scheduler", "scheduler"),
    ("kruntimes-bench-path", "callers"),
    ("kube-apiserver", "apiserver"),
    ("kubelet", "kubelet"),
    ("etcd", "etcd"),
];

/// Time that each process has run so far, microseconds, by process id.
#[derive(Debug, Clone, Default)]
pub struct Used(BTreeMap<u32, (&'static str, u64)>);

impl Used {
    /// Until now. What cannot be read has ended.
    #[must_use]
    pub fn now() -> Self {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let used = processes.filter_map(|process| {
            let id = process.file_name().to_str()?.parse().ok()?;
            let micros = threads(&process.path());
            Some((id, (program(&process.path())?, micros)))
        });
        Self(used.collect())
    }

    /// Microseconds by program since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> BTreeMap<&'static str, u64> {
        let mut by_program = BTreeMap::new();
        for (id, (program, micros)) in &self.0 {
            let earlier = before.0.get(id).map_or(0, |(_, micros)| *micros);
            *by_program.entry(*program).or_default() += micros.saturating_sub(earlier);
        }
        by_program
    }
}

fn program(process: &Path) -> Option<&'static str> {
    let command = fs::read(process.join("cmdline")).ok()?;
    let first = command.split(|byte| *byte == 0).next()?;
    let name = Path::new(std::str::from_utf8(first).ok()?)
        .file_name()?
        .to_str()?;
    let known = PROGRAMS.iter().find(|(program, _)| *program == name);
    Some(known.map_or("others", |(_, what)| what))
}

/// The first number of `schedstat` is the time on a processor, nanoseconds.
fn threads(process: &Path) -> u64 {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    let nanos = threads.filter_map(|thread| {
        let line = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        line.split(' ').next()?.parse::<u64>().ok()
    });
    nanos.sum::<u64>() / 1000
}
