//! The documents list what the code has: every reason, every metric, nothing else.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path))
        .map_err(|error| format!("{path}: {error}"))
        .expect("a file of this repository")
}

/// The code of a file, without its unit tests.
fn code(path: &str) -> String {
    let text = read(path);
    text.split("#[cfg(test)]").next().unwrap_or_default().to_owned()
}

/// Every text between two double quotes.
fn literals(code: &str) -> impl Iterator<Item = &str> {
    code.split('"').skip(1).step_by(2)
}

/// First cells in backquotes of the tables between two headings.
fn table(document: &str, from: &str, to: &str, column: usize) -> BTreeSet<String> {
    let (_, rest) = document.split_once(from).expect("the heading is there");
    let part = rest.split_once(to).map_or(rest, |(part, _)| part);
    part.lines()
        .filter(|line| line.starts_with("| "))
        .filter_map(|line| {
            line.split('|')
                .nth(column)?
                .trim()
                .strip_prefix('`')?
                .strip_suffix('`')
                .map(str::to_owned)
        })
        .collect()
}

fn is_word(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_uppercase())
        && text.bytes().all(|byte| byte.is_ascii_alphabetic())
}

#[test]
fn every_reason_of_the_owner_is_documented_c_3_2() {
    let documented = table(
        &read("docs/reasons.md"),
        "## Said by the owner",
        "## Reasons of a Run",
        2,
    );
    // Lines such as `Busy => ResourceExhausted, No, Runtimed;`.
    let known: BTreeSet<String> = code("proto/src/failure.rs")
        .lines()
        .filter(|line| line.trim_end().ends_with(';') && line.matches(", ").count() == 2)
        .filter_map(|line| line.trim().split_once(" => ").map(|(name, _)| name.to_owned()))
        .filter(|name| is_word(name))
        .collect();
    assert!(known.contains("Busy"), "the list of reasons was not found");
    assert_eq!(documented, known);
}

#[test]
fn every_reason_of_the_gateway_is_documented_c_3_2() {
    let documented = table(
        &read("docs/reasons.md"),
        "## Said by the gateway",
        "## Said by the owner",
        2,
    );
    let errors = code("gateway/src/error.rs");
    let (_, of_table) = errors.split_once("pub fn row(").expect("the table is there");
    let of_table = of_table
        .split_once("pub fn busy_at_most")
        .map_or(of_table, |(table, _)| table);
    let states = code("gateway/src/routes.rs");
    let (_, of_states) = states.split_once("pub fn as_str(").expect("the states are there");
    let mut known: BTreeSet<String> = literals(of_table)
        .chain(literals(of_states))
        .filter(|it| is_word(it))
        .map(str::to_owned)
        .collect();
    assert!(
        known.contains("NoSuchFunction") && known.contains("Pending"),
        "the reasons were not found: {known:?}"
    );
    // Said in the owner's name: it is in the other table.
    known.remove("RuntimeServerError");
    assert_eq!(documented, known);
}

#[test]
fn every_metric_is_documented() {
    let units = ["_total", "_seconds", "_bytes"];
    let base = |name: &str| {
        units.iter().fold(name.to_owned(), |name, unit| {
            name.trim_end_matches(unit).to_owned()
        })
    };
    let documented: BTreeSet<String> = table(&read("docs/metrics.md"), "# Metrics", "\u{0}", 1)
        .iter()
        .map(|name| base(name))
        .collect();
    let mut known = BTreeSet::new();
    for crate_name in ["gateway", "runtimed", "scheduler", "runtime-server"] {
        let prefix = format!("{}_", crate_name.replace('-', "_"));
        let source = code(&format!("{crate_name}/src/metrics.rs"));
        known.extend(
            literals(&source)
                .filter(|it| it.starts_with(&prefix))
                .map(|it| base(&format!("kruntimes_{it}"))),
        );
        known.extend(
            literals(&source)
                .filter(|it| it.starts_with("http_server_"))
                .map(base),
        );
    }
    known.extend(
        literals(&code("crates/trace/src/export.rs"))
            .filter(|it| it.starts_with("trace_"))
            .map(|it| base(&format!("kruntimes_{it}"))),
    );
    known.extend(
        literals(&code("crates/ops/src/metrics.rs"))
            .filter(|it| it.starts_with("process_") || it.starts_with("kruntimes_"))
            .filter(|it| !it.contains(' '))
            .map(base),
    );
    assert!(known.len() > 20, "the metrics were not found: {known:?}");
    assert_eq!(documented, known);
}

/// Alerts and dashboard ask for metrics that are there, and the document lists the alerts as they are.
#[test]
fn alerts_and_dashboard_speak_of_documented_metrics() {
    let documented = table(&read("docs/metrics.md"), "# Metrics", "\u{0}", 1);
    let alerts = read("charts/kruntimes/files/alerts.yaml");
    let dashboard = read("charts/kruntimes/files/dashboard.json");
    for text in [&alerts, &dashboard] {
        let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
        let metrics: BTreeSet<&str> = words
            .filter(|word| {
                ["kruntimes_", "http_server_", "process_"]
                    .iter()
                    .any(|it| word.starts_with(it))
            })
            .map(|word| word.trim_end_matches("_bucket"))
            .collect();
        assert!(metrics.len() > 5, "{metrics:?}");
        for metric in metrics {
            assert!(documented.contains(metric), "{metric} is not in docs/metrics.md");
        }
    }

    let alerts: serde_json::Value = serde_saphyr::from_str(&alerts).unwrap();
    let rules = alerts["groups"][0]["rules"].as_array().unwrap();
    let operate = read("docs/operate.md");
    for rule in rules {
        let (name, expression) = (rule["alert"].as_str().unwrap(), rule["expr"].as_str().unwrap());
        let pause = rule["for"]
            .as_str()
            .map(|it| format!(" for {}", it.replace('m', " m")));
        let row = format!("| `{name}` | `{expression}`{} |", pause.unwrap_or_default());
        assert!(operate.contains(&row), "docs/operate.md lacks {row}");
        for part in ["summary", "description"] {
            assert!(rule["annotations"][part].is_string(), "{name}: {part}");
        }
    }
    assert_eq!(operate.matches("| `Kruntimes").count(), rules.len());
    serde_json::from_str::<serde_json::Value>(&dashboard).unwrap();
}

#[test]
fn links_between_documents_lead_somewhere() {
    for document in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/contract.md",
        "docs/reasons.md",
        "docs/metrics.md",
        "docs/install.md",
        "docs/operate.md",
        "docs/functions.md",
        "docs/functions-bash.md",
        "docs/custom-runtime-server.md",
    ] {
        let folder = root()
            .join(document)
            .parent()
            .expect("a document has a folder")
            .to_owned();
        for link in read(document)
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
        {
            let file = link.split('#').next().unwrap_or_default();
            if !link.contains("://") && !file.is_empty() {
                assert!(
                    folder.join(file).exists(),
                    "{document} links to {link}, which is not there"
                );
            }
        }
    }
}

#[test]
fn the_chart_ships_the_crds_of_this_code() {
    for (name, crd) in [
        ("run", kruntimes_api::crd::run()),
        ("runtime", kruntimes_api::crd::runtime()),
    ] {
        let path = format!("charts/kruntimes/files/crds/{name}.yaml");
        let made = kruntimes_api::crd::to_yaml(&crd).expect("a CRD can be written");
        assert!(
            read(&path) == format!("---\n{made}"),
            "{path} is out of date; run: make generate"
        );
    }
}
