//! Which function to run: the registered handler, and what `HANDLER_*` of the
//! registration's environment change about it (C-8.4).

use std::path::{Component, Path, PathBuf};

use crate::environment::{HANDLER_FOLDER, HANDLER_FUNCTION_NAME, HANDLER_MODULE_NAME};

/// A handler with its parts settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handler {
    /// `module.function`; whether the language can have such names is for its adapter.
    pub name: String,
    /// Where the module is looked for, below the working directory; relative.
    pub folder: PathBuf,
}

impl Handler {
    /// Settles them. The environment wins over the parts of `handler`; an empty value
    /// means the default.
    ///
    /// # Errors
    /// When `HANDLER_FOLDER` leads out of the source.
    pub fn resolve(handler: &str, env: &[(String, String)]) -> Result<Self, String> {
        let given = |wanted: &str| {
            env.iter()
                .find(|(name, value)| name == wanted && !value.is_empty())
                .map(|(_, value)| value.as_str())
        };
        let folder = given(HANDLER_FOLDER).map(folder).transpose()?.unwrap_or_default();
        let name = match handler.rsplit_once('.') {
            Some((module, function)) => format!(
                "{}.{}",
                given(HANDLER_MODULE_NAME).unwrap_or(module),
                given(HANDLER_FUNCTION_NAME).unwrap_or(function)
            ),
            None => handler.to_owned(),
        };
        Ok(Self { name, folder })
    }
}

/// `/` is the root of the source, so that the name's traditional default is one here too.
fn folder(text: &str) -> Result<PathBuf, String> {
    let mut below = PathBuf::new();
    for part in Path::new(text).components() {
        match part {
            Component::Normal(part) => below.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(format!(
                    "env {HANDLER_FOLDER} must be a folder inside the source, without `..`"
                ));
            }
        }
    }
    Ok(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(handler: &str, env: &[(&str, &str)]) -> Result<(String, String), String> {
        let env: Vec<_> = env
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Handler::resolve(handler, &env).map(|it| (it.name, it.folder.display().to_string()))
    }

    /// C-8.4: each of the three names has an effect, and a default.
    #[test]
    fn the_environment_wins_over_the_handlers_parts() {
        let some = |name: &str, folder: &str| Ok((name.to_owned(), folder.to_owned()));
        assert_eq!(resolve("pkg.main.go", &[]), some("pkg.main.go", ""));
        assert_eq!(
            resolve("pkg.main.go", &[(HANDLER_MODULE_NAME, "other")]),
            some("other.go", "")
        );
        assert_eq!(
            resolve("pkg.main.go", &[(HANDLER_FUNCTION_NAME, "stop")]),
            some("pkg.main.stop", "")
        );
        assert_eq!(
            resolve(
                "main.go",
                &[(HANDLER_FOLDER, "src/app"), (HANDLER_MODULE_NAME, "")]
            ),
            some("main.go", "src/app")
        );
        for root in ["/", "", ".", "./"] {
            assert_eq!(resolve("main.go", &[(HANDLER_FOLDER, root)]), some("main.go", ""));
        }
        assert_eq!(
            resolve("main.go", &[(HANDLER_FOLDER, "/src")]),
            some("main.go", "src")
        );
    }

    #[test]
    fn a_folder_outside_the_source_is_refused_by_its_name() {
        for bad in ["..", "/..", "src/../../other"] {
            let error = resolve("main.go", &[(HANDLER_FOLDER, bad)]).unwrap_err();
            assert!(error.contains(HANDLER_FOLDER), "{error}");
        }
    }
}
