//! Rules of the repository as tests: who decides does no I/O, every test file is
//! reached, and no file has become two rooms.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Files that decide: facts and `now` in, values out. Kept here, because a new one
/// should be a decision too.
const DECIDING: &[&str] = &[
    "crates/api/src/invoke_path.rs",
    "crates/api/src/keys.rs",
    "crates/api/src/names.rs",
    "crates/api/src/quantity.rs",
    "crates/api/src/retry.rs",
    "crates/api/src/status.rs",
    "crates/authz/src/token.rs",
    "crates/authz/src/ttl.rs",
    "e2e/src/chaos/check.rs",
    "e2e/src/chaos/figures.rs",
    "e2e/src/chaos/history.rs",
    "e2e/src/chaos/plan.rs",
    "gateway/src/admit.rs",
    "gateway/src/error.rs",
    "gateway/src/reply.rs",
    "gateway/src/request.rs",
    "gateway/src/routes/facts.rs",
    "gateway/src/routes/table.rs",
    "proto/src/failure.rs",
    "proto/src/ids.rs",
    "proto/src/limits.rs",
    "runtime-server/src/outcome.rs",
    "runtime-server/src/registry.rs",
    "runtime-server/src/worker/frame.rs",
    "runtime-server/src/worker/lines.rs",
    "runtimed/src/admission.rs",
    "runtimed/src/bounds.rs",
    "runtimed/src/fence.rs",
    "runtimed/src/lifecycle/decide.rs",
    "runtimed/src/lifecycle/timers.rs",
    "scheduler/src/assumed.rs",
    "scheduler/src/cycle.rs",
    "scheduler/src/filter.rs",
    "scheduler/src/look.rs",
    "scheduler/src/plan.rs",
    "scheduler/src/pool.rs",
    "scheduler/src/recover.rs",
    "scheduler/src/score.rs",
    "scheduler/src/snapshot.rs",
];

/// What a deciding file has no use for: sockets, files, processes, clusters, clocks.
const IO: &[&str] = &[
    "std::fs",
    "std::process",
    "tokio::fs",
    "tokio::net",
    "tokio::process",
    "TcpStream",
    "UnixStream",
    "kube::Client",
    "kube::Api",
    "kube::{Api",
    "Instant::now()",
    "SystemTime::now()",
    "Timestamp::now()",
    "tracing::info!",
    "tracing::warn!",
    "tracing::error!",
];

/// Longest file; generated code aside.
const LINES: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path)
        .map_err(|error| format!("{}: {error}", path.display()))
        .expect("a file of this repository")
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
        let (path, name) = (entry.path(), entry.file_name());
        let skipped = ["target", "gen", "build", "node_modules", ".git"];
        if path.is_dir() {
            if !skipped.iter().any(|it| name == *it) {
                files(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

fn all_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), &mut found);
    found
}

fn is_code(path: &Path) -> bool {
    path.extension()
        .is_some_and(|it| ["rs", "py", "sh", "js", "mjs"].iter().any(|known| it == *known))
}

#[test]
fn files_that_decide_do_no_io() {
    for name in DECIDING {
        let text = read(&root().join(name));
        let code: String = text
            .split("#[cfg(test)]")
            .next()
            .unwrap_or_default()
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .collect::<Vec<_>>()
            .join("\n");
        for word in IO {
            assert!(
                !code.contains(word),
                "{name} decides, but uses {word}: pass the fact in instead"
            );
        }
    }
}

#[test]
fn every_test_file_is_reached_by_a_mod_line() {
    for path in all_files() {
        let shown = path.display().to_string();
        if !shown.ends_with(".rs") || !shown.contains("/tests/") || shown.ends_with("/main.rs") {
            continue;
        }
        let folder = path.parent().expect("a file has a folder");
        if folder.ends_with("tests") && !folder.parent().is_some_and(|it| it.ends_with("src")) {
            // A test target of its own.
            continue;
        }
        let stem = path.file_stem().and_then(|it| it.to_str()).unwrap_or_default();
        let (name, around) = if stem == "mod" {
            let name = folder.file_name().and_then(|it| it.to_str()).unwrap_or_default();
            (name, folder.parent().expect("a folder has a parent"))
        } else {
            (stem, folder)
        };
        let line = format!("mod {name};");
        let parent_file = around.with_extension("rs");
        let mut beside: Vec<PathBuf> = fs::read_dir(around)
            .expect("a folder")
            .filter_map(Result::ok)
            .map(|it| it.path())
            .filter(|it| it.extension().is_some_and(|it| it == "rs"))
            .collect();
        beside.push(parent_file);
        assert!(
            beside
                .iter()
                .any(|it| fs::read_to_string(it).is_ok_and(|text| text.contains(&line))),
            "no file declares `{line}`, so {shown} is never run"
        );
    }
}

#[test]
fn no_file_has_become_two_rooms() {
    for path in all_files().into_iter().filter(|it| is_code(it)) {
        let lines = read(&path).lines().count();
        assert!(
            lines <= LINES,
            "{} has {lines} lines; above {LINES} there are two rooms in it",
            path.display()
        );
    }
}
