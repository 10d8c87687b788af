//! The environment of a worker: nothing of the server's leaks into it by accident.

use std::{collections::BTreeMap, ffi::OsString, path::Path};

use kruntimes_proto::ids::RegistrationId;

/// Names that workers inherit from the server.
const INHERITED: &[&str] = &["PATH", "HOME", "LANG", "TZ"];
/// What is used for `PATH` when the server has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// What is used for `LANG` when the server has none: text is UTF-8.
const DEFAULT_LANG: &str = "C.UTF-8";

/// The inherited part, read once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inherited(BTreeMap<String, String>);

impl Inherited {
    /// Picks the few names out of an environment.
    pub fn pick(all: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let mut picked: BTreeMap<_, _> = all
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| INHERITED.contains(&name.as_str()))
            .collect();
        for (name, value) in [("PATH", DEFAULT_PATH), ("LANG", DEFAULT_LANG)] {
            picked.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
        Self(picked)
    }
}

/// `NAME=value` by which every process of a registration is recognised.
#[must_use]
pub fn mark(id: &RegistrationId) -> String {
    format!("KRUNTIME_REGISTRATION_ID={id}")
}

/// The whole environment, the later winning: inherited, the language's, the
/// registration's, ours.
#[must_use]
pub fn worker(
    inherited: &Inherited,
    run_uid: &str,
    id: &RegistrationId,
    private: &Path,
    language: Vec<(String, String)>,
    registration: Vec<(String, String)>,
) -> Vec<(String, String)> {
    let mut env = inherited.0.clone();
    env.insert("TMPDIR".to_owned(), private.display().to_string());
    env.extend(language);
    env.extend(registration);
    env.insert("KRUNTIME_RUN_UID".to_owned(), run_uid.to_owned());
    env.insert("KRUNTIME_REGISTRATION_ID".to_owned(), id.to_string());
    env.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_sees_little_of_the_server_and_cannot_rename_itself() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let server = [
            pair("PATH", "/bin"),
            pair("TOKEN", "x"),
            pair("TZ", "UTC"),
            pair("SERVER_CALL_TIMEOUT", "1"),
        ];
        let inherited = Inherited::pick(
            server
                .map(|(name, value)| (name.into(), value.into()))
                .into_iter(),
        );
        let id = RegistrationId::generate();
        let own = vec![
            pair("FUNC_NAME", "f"),
            pair("KRUNTIME_REGISTRATION_ID", "forged"),
            pair("TZ", "CET"),
        ];
        let env = worker(&inherited, "uid", &id, Path::new("/private"), vec![], own);
        let names: Vec<&str> = env.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "FUNC_NAME",
                "KRUNTIME_REGISTRATION_ID",
                "KRUNTIME_RUN_UID",
                "LANG",
                "PATH",
                "TMPDIR",
                "TZ"
            ]
        );
        assert!(env.contains(&pair("TZ", "CET")));
        assert!(
            env.iter()
                .any(|(name, value)| format!("{name}={value}") == mark(&id))
        );
    }
}
