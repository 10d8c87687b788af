//! The environment of a worker: nothing of the server's leaks into it by accident, and
//! the fourteen names that functions may rely on have their defaults here (C-8.4).

use std::{collections::BTreeMap, ffi::OsString, path::Path, time::Duration};

use kruntimes_proto::ids::RegistrationId;

use crate::handler::Handler;

/// Where the module of a handler is, inside the source.
pub const HANDLER_FOLDER: &str = "HANDLER_FOLDER";
/// The module of a handler.
pub const HANDLER_MODULE_NAME: &str = "HANDLER_MODULE_NAME";
/// The function of a handler.
pub const HANDLER_FUNCTION_NAME: &str = "HANDLER_FUNCTION_NAME";
/// Longest call, seconds.
pub const SERVER_CALL_TIMEOUT: &str = "SERVER_CALL_TIMEOUT";
/// Where spans go.
pub const TRACE_COLLECTOR_ENDPOINT: &str = "TRACE_COLLECTOR_ENDPOINT";
/// Where events go.
pub const PUBLISHER_PROXY_ADDRESS: &str = "PUBLISHER_PROXY_ADDRESS";
const FUNC_RUNTIME: &str = "FUNC_RUNTIME";

/// What a function sees of a name that nobody sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Default {
    /// This text.
    Text(&'static str),
    /// What is found out when the server or the function starts.
    Computed,
    /// The name is not there.
    Absent,
}

/// The fourteen names.
const NAMES: [(&str, Default); 14] = [
    ("FUNC_NAME", Default::Text("")),
    ("FUNC_NAMESPACE", Default::Text("")),
    ("FUNC_LABELS", Default::Text("")),
    ("FUNC_ANNOTATIONS", Default::Text("")),
    (FUNC_RUNTIME, Default::Computed),
    ("SERVER_HOST", Default::Text("0.0.0.0")),
    ("SERVER_PORT", Default::Text("8080")),
    ("SERVER_NUMTHREADS", Default::Text("50")),
    (SERVER_CALL_TIMEOUT, Default::Computed),
    (HANDLER_FOLDER, Default::Text("/")),
    (HANDLER_MODULE_NAME, Default::Computed),
    (HANDLER_FUNCTION_NAME, Default::Computed),
    (TRACE_COLLECTOR_ENDPOINT, Default::Absent),
    (PUBLISHER_PROXY_ADDRESS, Default::Absent),
];

/// Names that workers inherit from the server besides the fourteen.
const INHERITED: &[&str] = &["PATH", "HOME", "LANG", "TZ"];
/// What is used for `PATH` when the server has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// What is used for `LANG` when the server has none: text is UTF-8.
const DEFAULT_LANG: &str = "C.UTF-8";

/// The inherited part, read once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inherited {
    names: BTreeMap<String, String>,
    call_timeout: String,
}

impl Inherited {
    /// Picks the few names out of an environment. `runtime` is the language, such as
    /// `python311`; `call_timeout` what this server enforces.
    pub fn pick(
        all: impl Iterator<Item = (OsString, OsString)>,
        runtime: &str,
        call_timeout: Duration,
    ) -> Self {
        // Which function runs is the registration's affair, not the server's.
        let ours = |name: &str| {
            INHERITED.contains(&name)
                || (!name.starts_with("HANDLER_") && NAMES.iter().any(|(known, _)| *known == name))
        };
        let mut names: BTreeMap<_, _> = all
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, value)| ours(name) && !value.is_empty())
            .collect();
        let defaults = NAMES.into_iter().filter_map(|(name, default)| match default {
            Default::Text(text) => Some((name, text)),
            Default::Computed | Default::Absent => None,
        });
        let computed = [
            ("PATH", DEFAULT_PATH),
            ("LANG", DEFAULT_LANG),
            (FUNC_RUNTIME, runtime),
        ];
        for (name, value) in defaults.chain(computed) {
            names.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
        Self {
            names,
            call_timeout: call_timeout.as_secs_f64().to_string(),
        }
    }

    /// One of them, if it is there.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.names.get(name).map(String::as_str)
    }

    /// What this server calls its language.
    #[must_use]
    pub fn runtime(&self) -> &str {
        self.get(FUNC_RUNTIME).unwrap_or_default()
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
    handler: &Handler,
    language: Vec<(String, String)>,
    registration: Vec<(String, String)>,
) -> Vec<(String, String)> {
    let mut env = inherited.names.clone();
    env.insert("TMPDIR".to_owned(), private.display().to_string());
    env.extend(language);
    env.extend(registration);
    let (module, function) = handler.name.rsplit_once('.').unwrap_or((&handler.name, ""));
    for (name, value) in [
        (HANDLER_FOLDER, format!("/{}", handler.folder.display())),
        (HANDLER_MODULE_NAME, module.to_owned()),
        (HANDLER_FUNCTION_NAME, function.to_owned()),
        (SERVER_CALL_TIMEOUT, inherited.call_timeout.clone()),
        ("KRUNTIME_RUN_UID", run_uid.to_owned()),
        ("KRUNTIME_REGISTRATION_ID", id.to_string()),
    ] {
        env.insert(name.to_owned(), value);
    }
    env.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    fn environment(server: &[(&str, &str)], own: &[(&str, &str)]) -> BTreeMap<String, String> {
        let server = server.iter().map(|(name, value)| (name.into(), value.into()));
        let inherited = Inherited::pick(server, "python314", Duration::from_secs(180));
        let own: Vec<_> = own.iter().map(|(name, value)| pair(name, value)).collect();
        let handler = Handler::resolve("pkg.main.go", &own).unwrap();
        let id = RegistrationId::parse(b"reg_1").unwrap();
        worker(
            &inherited,
            "uid",
            &id,
            Path::new("/private"),
            &handler,
            vec![],
            own,
        )
        .into_iter()
        .collect()
    }

    /// C-8.4: fourteen names, each with its default inside the runtime.
    #[test]
    fn the_fourteen_names_are_there_with_their_defaults() {
        let env = environment(
            &[("PATH", "/bin"), ("TOKEN", "x"), ("HANDLER_FOLDER", "/server")],
            &[],
        );
        let want = [
            ("FUNC_ANNOTATIONS", ""),
            ("FUNC_LABELS", ""),
            ("FUNC_NAME", ""),
            ("FUNC_NAMESPACE", ""),
            ("FUNC_RUNTIME", "python314"),
            ("HANDLER_FOLDER", "/"),
            ("HANDLER_FUNCTION_NAME", "go"),
            ("HANDLER_MODULE_NAME", "pkg.main"),
            ("KRUNTIME_REGISTRATION_ID", "reg_1"),
            ("KRUNTIME_RUN_UID", "uid"),
            ("LANG", DEFAULT_LANG),
            ("PATH", "/bin"),
            ("SERVER_CALL_TIMEOUT", "180"),
            ("SERVER_HOST", "0.0.0.0"),
            ("SERVER_NUMTHREADS", "50"),
            ("SERVER_PORT", "8080"),
            ("TMPDIR", "/private"),
        ];
        assert_eq!(env, want.map(|(name, value)| pair(name, value)).into());
        let unset: BTreeSet<_> = NAMES.iter().map(|(name, _)| *name).collect();
        let unset: Vec<_> = unset
            .into_iter()
            .filter(|name| !env.contains_key(*name))
            .collect();
        assert_eq!(unset, [PUBLISHER_PROXY_ADDRESS, TRACE_COLLECTOR_ENDPOINT]);
    }

    #[test]
    fn the_registration_wins_over_the_server_and_neither_over_what_is_true() {
        let server = [
            ("TRACE_COLLECTOR_ENDPOINT", "http://server"),
            ("PUBLISHER_PROXY_ADDRESS", "http://proxy"),
            ("FUNC_RUNTIME", "theirs"),
            ("SERVER_CALL_TIMEOUT", "9"),
            ("TZ", "UTC"),
        ];
        let own = [
            ("TRACE_COLLECTOR_ENDPOINT", "http://run"),
            ("FUNC_NAME", "f"),
            ("HANDLER_FOLDER", "src"),
            ("KRUNTIME_REGISTRATION_ID", "forged"),
            ("SERVER_CALL_TIMEOUT", "1"),
        ];
        let env = environment(&server, &own);
        for (name, value) in [
            ("TRACE_COLLECTOR_ENDPOINT", "http://run"),
            ("PUBLISHER_PROXY_ADDRESS", "http://proxy"),
            ("FUNC_RUNTIME", "theirs"),
            ("FUNC_NAME", "f"),
            ("HANDLER_FOLDER", "/src"),
            ("KRUNTIME_REGISTRATION_ID", "reg_1"),
            ("SERVER_CALL_TIMEOUT", "180"),
            ("TZ", "UTC"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        let id = RegistrationId::parse(b"reg_1").unwrap();
        assert_eq!(
            mark(&id),
            format!("KRUNTIME_REGISTRATION_ID={}", env["KRUNTIME_REGISTRATION_ID"])
        );
    }

    /// C-8.4: what the guide for authors of functions says is what this code does.
    #[test]
    fn the_guide_lists_the_fourteen_names_with_these_defaults() {
        let guide = include_str!("../../docs/functions.md");
        let rows: BTreeMap<&str, &str> = guide
            .lines()
            .filter_map(|line| {
                let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
                Some((cells.next()?.strip_suffix('`')?, cells.next()?))
            })
            .collect();
        for (name, default) in NAMES {
            let said = rows.get(name).copied();
            let want = match default {
                Default::Absent => "not set".to_owned(),
                Default::Text("") => "empty".to_owned(),
                Default::Text(text) => format!("`{text}`"),
                Default::Computed => said.unwrap_or("missing").to_owned(),
            };
            assert_eq!(said, Some(want.as_str()), "{name}");
        }
    }
}
