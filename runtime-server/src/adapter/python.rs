//! Python: one warm interpreter per registration, driven by `shims/python/worker.py`.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{Adapter, Function, Program};
use crate::worker::wire::Speech;

const SHIM: &str = include_str!("../../shims/python/worker.py");
/// The package that functions may import.
const SDK: [(&str, &str); 5] = [
    (
        "__init__.py",
        include_str!("../../shims/python/kruntimes_function/__init__.py"),
    ),
    (
        "_events.py",
        include_str!("../../shims/python/kruntimes_function/_events.py"),
    ),
    (
        "_http.py",
        include_str!("../../shims/python/kruntimes_function/_http.py"),
    ),
    (
        "_opentelemetry.py",
        include_str!("../../shims/python/kruntimes_function/_opentelemetry.py"),
    ),
    (
        "_trace.py",
        include_str!("../../shims/python/kruntimes_function/_trace.py"),
    ),
];

/// Tells where the interpreter really is: a version manager's wrapper costs a shell
/// for every start.
const PROBE: &str = "import sys; print(sys.executable); print('.'.join(map(str, sys.version_info[:3])))";

/// The interpreter and the files it is given.
#[derive(Debug, Clone)]
pub struct Python {
    interpreter: PathBuf,
    version: String,
    shim: PathBuf,
    sdk: PathBuf,
}

impl Python {
    /// Finds the interpreter and writes the shim into `directory`.
    ///
    /// # Errors
    /// When `python` does not run, is too old, or the files cannot be written.
    pub fn prepare(python: &Path, directory: &Path) -> anyhow::Result<Self> {
        let output = Command::new(python)
            .args(["-I", "-S", "-c", PROBE])
            .output()
            .with_context(|| format!("run --python {}", python.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (interpreter, version) = text
            .trim()
            .split_once('\n')
            .filter(|(path, _)| Path::new(path).is_absolute())
            .with_context(|| format!("--python {} does not answer as Python does", python.display()))?;
        let minor = version
            .split('.')
            .nth(1)
            .and_then(|minor| minor.parse::<u32>().ok());
        anyhow::ensure!(
            version.starts_with("3.") && minor.is_some_and(|minor| minor >= 9),
            "--python {} is Python {version}; 3.9 or later is needed",
            python.display()
        );
        let sdk = directory.join("python");
        let package = sdk.join("kruntimes_function");
        fs::create_dir_all(&package).with_context(|| format!("create {}", package.display()))?;
        let shim = directory.join("worker.py");
        let sdk_files = SDK.map(|(name, text)| (package.join(name), text));
        for (path, text) in sdk_files.into_iter().chain([(shim.clone(), SHIM)]) {
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(Self {
            interpreter: PathBuf::from(interpreter),
            version: version.to_owned(),
            shim,
            sdk,
        })
    }
}

impl Adapter for Python {
    fn name(&self) -> String {
        format!("python {}", self.version)
    }

    fn program(&self, function: &Function) -> Result<Program, String> {
        let (module, name) = split(&function.handler)?;
        Ok(Program {
            program: self.interpreter.clone(),
            args: vec![
                self.shim.clone().into(),
                OsString::from(module),
                OsString::from(name),
                function.folder.clone().into(),
                self.sdk.clone().into(),
            ],
            speech: Speech::Frames,
            // No __pycache__ beside the sources: a file that is replaced within the
            // second, with the same size, would be taken for the old one.
            env: vec![("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned())],
            read: vec![self.shim.clone(), self.sdk.clone()],
        })
    }

    fn trial(&self) -> Vec<OsString> {
        vec!["-c".into(), "import json".into()]
    }

    fn source_file(&self, module: &str) -> PathBuf {
        PathBuf::from(module.replace('.', "/") + ".py")
    }
}

/// `pkg.module.function` → (`pkg.module`, `function`).
fn split(handler: &str) -> Result<(&str, &str), String> {
    let (module, name) = handler
        .rsplit_once('.')
        .ok_or_else(|| format!("handler {handler:?} needs the form file.function"))?;
    let identifier = |part: &str| {
        let mut letters = part.chars();
        letters
            .next()
            .is_some_and(|first| first.is_alphabetic() || first == '_')
            && letters.all(|letter| letter.is_alphanumeric() || letter == '_')
    };
    match handler.split('.').find(|part| !identifier(part)) {
        Some(part) => Err(format!(
            "handler {handler:?} has a part {part:?} that is no Python name"
        )),
        None => Ok((module, name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_a_module_path_and_a_function() {
        assert_eq!(split("main.handler"), Ok(("main", "handler")));
        assert_eq!(split("pkg.sub.main.handle_it"), Ok(("pkg.sub.main", "handle_it")));
        for bad in [
            "",
            "main",
            ".handler",
            "main.",
            "a..b",
            "../x.handler",
            "main.handler()",
            "1a.b",
            "a b.c",
            "main.-x",
        ] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }
}
