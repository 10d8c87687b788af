//! Bash: one warm shell per registration that has sourced the function's file, driven
//! by `shims/bash/worker.sh`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{Adapter, Function, Program};
use crate::worker::wire::Speech;

const SHIM: &str = include_str!("../../shims/bash/worker.sh");

/// Tells where the shell is and how old: `mapfile -d` came with 4.4.
const PROBE: &str = r#"printf '%s\n' "$BASH" "${BASH_VERSINFO[0]}" "${BASH_VERSINFO[1]}""#;
const OLDEST: (u32, u32) = (4, 4);

/// The shell and the script it is given.
#[derive(Debug, Clone)]
pub struct Bash {
    shell: PathBuf,
    version: (u32, u32),
    shim: PathBuf,
}

impl Bash {
    /// Finds the shell and writes the shim into `directory`.
    ///
    /// # Errors
    /// When `bash` does not run, is too old, or the shim cannot be written.
    pub fn prepare(bash: &Path, directory: &Path) -> anyhow::Result<Self> {
        // Paths of files beneath it are told to the worker in lines.
        anyhow::ensure!(
            !directory.as_os_str().as_encoded_bytes().contains(&b'\n'),
            "--state-dir must not hold a line end"
        );
        let output = Command::new(bash)
            .args(["-p", "-c", PROBE])
            .output()
            .with_context(|| format!("run --bash {}", bash.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (shell, version) = read_probe(&text)
            .with_context(|| format!("--bash {} does not answer as Bash does", bash.display()))?;
        anyhow::ensure!(
            version >= OLDEST,
            "--bash {} is Bash {}.{}; {}.{} or later is needed",
            bash.display(),
            version.0,
            version.1,
            OLDEST.0,
            OLDEST.1
        );
        let shim = directory.join("worker.sh");
        fs::write(&shim, SHIM).with_context(|| format!("write {}", shim.display()))?;
        Ok(Self { shell, version, shim })
    }
}

impl Adapter for Bash {
    fn name(&self) -> String {
        format!("bash {}.{}", self.version.0, self.version.1)
    }

    fn program(&self, function: &Function) -> Result<Program, String> {
        let (file, name) = split(&function.handler)?;
        // The shell starts in the working directory, whatever folder the file is in.
        let folder = function.folder.strip_prefix(&function.working_dir);
        let file = folder.unwrap_or_else(|_| Path::new("")).join(file);
        Ok(Program {
            program: self.shell.clone(),
            // -p: the environment must not bring functions, options or a start-up
            // file into the shell before the wire is out of their reach.
            args: vec!["-p".into(), self.shim.clone().into(), file.into(), name.into()],
            speech: Speech::Lines,
            env: vec![],
            read: vec![self.shim.clone()],
        })
    }

    fn trial(&self) -> Vec<std::ffi::OsString> {
        vec!["-p".into(), "-c".into(), "mapfile -t words <<<word".into()]
    }

    fn source_file(&self, module: &str) -> PathBuf {
        PathBuf::from(module.replace('.', "/") + ".sh")
    }
}

fn read_probe(text: &str) -> Option<(PathBuf, (u32, u32))> {
    let mut lines = text.lines();
    let shell = PathBuf::from(lines.next()?);
    let version = (lines.next()?.parse().ok()?, lines.next()?.parse().ok()?);
    shell.is_absolute().then_some((shell, version))
}

/// `dir.file.function` → (`dir/file.sh`, `function`).
fn split(handler: &str) -> Result<(String, &str), String> {
    let (path, name) = handler
        .rsplit_once('.')
        .ok_or_else(|| format!("handler {handler:?} needs the form file.function"))?;
    let word = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && part
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-'))
    };
    if let Some(part) = handler.split('.').find(|part| !word(part)) {
        return Err(format!(
            "handler {handler:?} has a part {part:?}; letters, digits, `_` and `-` are allowed"
        ));
    }
    if name.starts_with("__kr_") {
        return Err(format!(
            "handler {handler:?}: function names that begin with __kr_ are reserved"
        ));
    }
    Ok((format!("{}.sh", path.replace('.', "/")), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_a_file_and_a_function() {
        assert_eq!(split("main.handler"), Ok(("main.sh".to_owned(), "handler")));
        assert_eq!(
            split("lib.sub-2.main.handle_it"),
            Ok(("lib/sub-2/main.sh".to_owned(), "handle_it"))
        );
        for bad in [
            "",
            "main",
            ".handler",
            "main.",
            "a..b",
            "../x.handler",
            "/etc.handler",
            "main.handler()",
            "main.handler;id",
            "main.$(id)",
            "a b.c",
            "main.-x",
            "-x.handler",
            "main.__kr_run",
        ] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_probe_names_shell_and_version() {
        assert_eq!(
            read_probe("/usr/bin/bash\n5\n2\n"),
            Some((PathBuf::from("/usr/bin/bash"), (5, 2)))
        );
        for bad in ["", "bash\n5\n2\n", "/bin/sh\n\n\n"] {
            assert_eq!(read_probe(bad), None, "{bad:?}");
        }
    }
}
