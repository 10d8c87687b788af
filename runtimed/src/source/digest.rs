//! The registration digest: SHA-256 over the immutable inputs in canonical JSON (C-5.2).
//!
//! It holds what the server would have to start anew for: source, handler, environment, idle time. It
//! holds neither the work directory, which is a place and no input, nor labels, which may change
//! while the function runs.

use std::{collections::BTreeMap, fmt::Write as _};

use kruntimes_api::Run;
use ring::digest;
use serde::Serialize;

/// Canonical: fields in this order, maps sorted by key, no blanks.
#[derive(Serialize)]
struct Inputs<'a> {
    version: u8,
    inline: Option<String>,
    inline_path: Option<&'a str>,
    repo_url: Option<&'a str>,
    commit: Option<&'a str>,
    handler: &'a str,
    env: &'a BTreeMap<String, String>,
    idle_timeout_seconds: i64,
}

/// `sha256:` and 64 lower-case hex digits.
#[must_use]
pub fn of(run: &Run, handler: &str, env: &BTreeMap<String, String>, idle_timeout_seconds: i64) -> String {
    let source = run.spec.source.as_ref();
    let inputs = Inputs {
        version: 1,
        inline: source
            .and_then(|it| it.inline.as_deref())
            .map(|text| hex(text.as_bytes())),
        inline_path: source.and_then(|it| it.inline_path.as_deref()),
        repo_url: source.and_then(|it| it.repo_url.as_deref()),
        commit: source.and_then(|it| it.commit_sha.as_deref()),
        handler,
        env,
        idle_timeout_seconds,
    };
    // Strings and numbers only: this cannot fail, and an empty text would only cost a new start.
    format!("sha256:{}", hex(&serde_json::to_vec(&inputs).unwrap_or_default()))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(64);
    for byte in digest::digest(&digest::SHA256, bytes).as_ref() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;

    use super::*;

    fn digest(run: &Run, env: &[(&str, &str)]) -> String {
        let env = env
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        of(run, "main.handler", &env, 0)
    }

    #[test]
    fn the_same_inputs_give_the_same_digest_whatever_their_order() {
        let run = fixtures::run("ns", "n").build();
        let one = digest(&run, &[("A", "1"), ("B", "2")]);
        assert_eq!(one, digest(&run, &[("B", "2"), ("A", "1")]));
        assert!(one.starts_with("sha256:") && one.len() == 71, "{one}");
        assert_eq!(one, one.to_lowercase());
    }

    #[test]
    fn status_and_labels_are_no_inputs() {
        let run = fixtures::run("ns", "n").build();
        let later = fixtures::run("ns", "n")
            .ready_on("pod-a")
            .with(|run| run.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())])))
            .build();
        assert_eq!(digest(&run, &[]), digest(&later, &[]));
    }

    #[test]
    fn every_input_changes_it() {
        let run = fixtures::run("ns", "n").build();
        let before = digest(&run, &[]);
        let text = fixtures::run("ns", "n")
            .with(|run| run.spec.source.as_mut().unwrap().inline = Some("other".to_owned()))
            .build();
        let path = fixtures::run("ns", "n")
            .with(|run| run.spec.source.as_mut().unwrap().inline_path = Some("other.py".to_owned()))
            .build();
        let none = fixtures::run("ns", "n")
            .with(|run| run.spec.source = None)
            .build();
        for other in [
            digest(&text, &[]),
            digest(&path, &[]),
            digest(&none, &[]),
            digest(&run, &[("A", "")]),
        ] {
            assert_ne!(before, other);
        }
        assert_ne!(before, of(&run, "main.other", &BTreeMap::new(), 0));
        assert_ne!(before, of(&run, "main.handler", &BTreeMap::new(), 1));
    }
}
