//! `docs/promises.md` says which tests hold which promise of `docs/contract.md`. It is
//! made from the tests themselves: a test names its promises (`C-3.6`) in its comment.
//! A promise without a test fails here, and so does a test of a promise that is not made.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// Promises of sections that are held here; section 1 is the summary of the others.
const SECTIONS: std::ops::RangeInclusive<u32> = 2..=8;

/// Sections that promise something before their numbers, or without any.
const WITH_TEXT: [u32; 3] = [2, 3, 4];

/// Promise, for example (3, 6); 0 is what a section says outside its numbers.
type Number = (u32, u32);

/// Tests by file.
type Holders = BTreeMap<String, BTreeSet<String>>;

#[test]
fn every_promise_has_a_test_and_the_table_is_current() {
    let promised = promises(&read("docs/contract.md"));
    assert!(promised.len() > 30, "the promises were not found: {promised:?}");
    let held = holders();
    let missing: Vec<String> = promised
        .keys()
        .filter(|number| !held.contains_key(*number))
        .map(name)
        .collect();
    assert!(
        missing.is_empty(),
        "no test names {missing:?} in its comment: write one, or do not promise it"
    );
    let unknown: Vec<String> = held
        .iter()
        .filter(|(number, _)| !promised.contains_key(*number))
        .map(|(number, holders)| format!("{} in {:?}", name(number), holders.keys()))
        .collect();
    assert!(
        unknown.is_empty(),
        "named by tests, but not promised: {unknown:?}"
    );
    let table = table(&promised, &held);
    let path = root().join("docs/promises.md");
    if std::env::var_os("KRUNTIMES_UPDATE").is_some() {
        fs::write(&path, &table).expect("docs/promises.md can be written");
    }
    assert!(
        read("docs/promises.md") == table,
        "docs/promises.md is out of date; run: make generate"
    );
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_default()
}

fn name(number: &Number) -> String {
    match number {
        (section, 0) => format!("C-{section}"),
        (section, item) => format!("C-{section}.{item}"),
    }
}

/// Numbered sentences by section, each with its first words.
fn promises(contract: &str) -> BTreeMap<Number, String> {
    let mut found = BTreeMap::new();
    let mut section = 0;
    for line in contract.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = leading_number(title).unwrap_or_default();
            if WITH_TEXT.contains(&section)
                && let Some((_, title)) = title.split_once(". ")
            {
                found.insert((section, 0), title.to_owned());
            }
        } else if SECTIONS.contains(&section)
            && let Some(item) = leading_number(line)
            && let Some((_, text)) = line.split_once(". ")
        {
            found.insert((section, item), first_words(text));
        }
    }
    found
}

fn leading_number(text: &str) -> Option<u32> {
    let (number, _) = text.split_once(". ")?;
    number.parse().ok()
}

fn first_words(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(12).collect();
    let text = words.join(" ").replace('|', "\\|");
    match text.split_once(". ") {
        Some((sentence, _)) => sentence.to_owned(),
        None => format!("{} …", text.trim_end_matches(['.', ',', ':', ';'])),
    }
}

/// Which tests name which promise.
fn holders() -> BTreeMap<Number, Holders> {
    let mut held = BTreeMap::<Number, Holders>::new();
    let mut files = Vec::new();
    for folder in [
        "crates",
        "proto",
        "gateway",
        "runtimed",
        "scheduler",
        "runtime-server",
        "e2e",
        "sim",
        "loadtest",
        "charts",
    ] {
        walk(&root().join(folder), &mut files);
    }
    for path in files {
        let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let text = fs::read_to_string(&path).unwrap_or_default();
        for (numbers, test) in named(&shown, &text) {
            for number in numbers {
                held.entry(number)
                    .or_default()
                    .entry(shown.clone())
                    .or_default()
                    .insert(test.clone());
            }
        }
    }
    held
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).expect("a folder of this repository");
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            if !["target", "gen", "fuzz"].contains(&entry.file_name().to_str().unwrap_or_default()) {
                walk(&path, files);
            }
        } else if path
            .extension()
            .is_some_and(|it| ["rs", "js", "sh"].iter().any(|known| it == *known))
        {
            files.push(path);
        }
    }
}

/// Promises in the comments of a file's tests, each with the test's name.
fn named(path: &str, text: &str) -> Vec<(Vec<Number>, String)> {
    if !path.ends_with(".rs") {
        // Scripts hold what they name as a whole.
        let comments = text
            .lines()
            .filter(|line| line.starts_with("//") || line.trim_start().starts_with('#'));
        return vec![(comments.flat_map(numbers).collect(), String::new())];
    }
    let suite = path.contains("/tests/")
        || path.contains("/suite/")
        || path.ends_with("tests.rs")
        || path.ends_with("_test.rs");
    let start = if suite {
        0
    } else {
        text.find("#[cfg(test)]").unwrap_or(text.len())
    };
    let mut found = Vec::new();
    let mut waiting = Vec::new();
    for line in text[start..].lines().map(str::trim_start) {
        if line.starts_with("//!") {
            // Held by the file as a whole.
            found.push((numbers(line), String::new()));
        } else if line.starts_with("//") {
            waiting.extend(numbers(line));
        } else if let Some(test) = function(line) {
            // A test may say it by its name alone.
            waiting.extend(in_name(test));
            if !waiting.is_empty() {
                found.push((std::mem::take(&mut waiting), test.to_owned()));
            }
        } else if !line.starts_with('#') && !line.starts_with("clippy") && !line.starts_with("reason") {
            waiting.clear();
        }
    }
    found
}

/// `async fn name(` → `name`.
fn function(line: &str) -> Option<&str> {
    let line = line.trim_start_matches("pub ").trim_start_matches("async ");
    let rest = line.strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

/// `C-3.6` → (3, 6); `C-4` → (4, 0).
fn numbers(line: &str) -> Vec<Number> {
    line.split("C-")
        .skip(1)
        .filter_map(|rest| {
            let number: String = rest
                .chars()
                .take_while(|it| it.is_ascii_digit() || *it == '.')
                .collect();
            let mut parts = number.trim_end_matches('.').splitn(2, '.');
            let section = parts.next()?.parse().ok()?;
            let item = parts.next().map_or(Some(0), |item| item.parse().ok())?;
            SECTIONS.contains(&section).then_some((section, item))
        })
        // The whole of section 4 is one promise.
        .map(|(section, item)| if section == 4 { (4, 0) } else { (section, item) })
        .collect()
}

/// `…_c_3_6` → (3, 6).
fn in_name(test: &str) -> Vec<Number> {
    test.match_indices("c_")
        .filter(|(at, _)| *at == 0 || test[..*at].ends_with('_'))
        .filter_map(|(at, _)| {
            let mut parts = test[at + 2..].split('_');
            let section = parts.next()?.parse().ok()?;
            let item = parts.next()?.parse().ok()?;
            SECTIONS.contains(&section).then_some((section, item))
        })
        .collect()
}

fn table(promised: &BTreeMap<Number, String>, held: &BTreeMap<Number, Holders>) -> String {
    let mut text = String::from(
        "# Which test holds which promise\n\n\
         Made from the comments of the tests by `make generate`; the numbers are those of [contract.md](contract.md).\n\n\
         | Promise | Begins | Held by |\n| --- | --- | --- |\n",
    );
    for (number, words) in promised {
        let by: Vec<String> = held
            .get(number)
            .into_iter()
            .flatten()
            .map(|(file, tests)| {
                let tests: Vec<&str> = tests
                    .iter()
                    .map(String::as_str)
                    .filter(|it| !it.is_empty())
                    .collect();
                match tests.as_slice() {
                    [] => format!("`{file}`"),
                    tests => format!("`{file}`: {}", tests.join(", ")),
                }
            })
            .collect();
        let _ = writeln!(text, "| {} | {words} | {} |", name(number), by.join("; "));
    }
    text
}

#[test]
fn promises_are_found_where_they_are_written() {
    let contract =
        "## 2. API\n1. One thing. More.\n2. A second | thing\n## 9. Not\n1. nothing\n## 4. The hop\ntext\n";
    let found = promises(contract);
    assert_eq!(
        found.keys().copied().collect::<Vec<_>>(),
        [(2, 0), (2, 1), (2, 2), (4, 0)]
    );
    assert_eq!(found[&(2, 1)], "One thing");
    let source = "//! C-5.8.\n/// C-3.6 and C-4: no.\n#[tokio::test]\nasync fn one() {}\n\
                  // C-3.7\nlet x = 1;\nfn none() {}\nfn by_name_c_5_2() {}\n";
    let by_test = named("a/tests/b.rs", source);
    assert_eq!(
        by_test,
        [
            (vec![(5, 8)], String::new()),
            (vec![(3, 6), (4, 0)], "one".to_owned()),
            (vec![(5, 2)], "by_name_c_5_2".to_owned()),
        ]
    );
    assert!(
        named("a/src/b.rs", source).is_empty(),
        "production code holds nothing"
    );
}
