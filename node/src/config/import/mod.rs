//! `quorate config import`: a config from that of another router, and a report of what it has no
//! counterpart for.
//!
//! A reader per form of file (`words`, `epp`) finds settings, a table per router (`others`) has what
//! takes their place, and `draft` makes a config of it that passes
//! `config check`. Nothing is left out silently: every setting that is read is named in the result.

mod convert;
mod draft;
mod epp;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    not(feature = "fuzzing"),
    expect(unreachable_pub, reason = "the targets are public with the feature")
)]
pub(crate) mod fuzzing;
mod source;
#[cfg(test)]
mod tests;
mod words;
mod yaml;

use std::path::{Path, PathBuf};

use self::draft::{Draft, Reason};
use self::source::Fault;
use self::words::Found;
use super::error::{ConfigError, ConfigErrors, Place};
use super::others::{AIBRIX, EPP, SMG, Table, VLLM_ROUTER};

/// The file's name that stands for standard input.
const STDIN: &str = "-";

/// Whose config is imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ImportKind {
    /// AIBrix's gateway: env files, Deployments and ConfigMaps, values of its chart
    Aibrix,
    /// SMG and `sglang_router`: command lines, files of flags, containers in YAML
    Smg,
    /// The vLLM router: command lines, files of flags, containers in YAML
    VllmRouter,
    /// Endpoint pickers: `EndpointPickerConfig`, also within a ConfigMap
    Epp,
}

/// A config made from that of another router.
#[derive(Debug)]
pub struct Imported {
    /// The config in TOML, with the source of each value, and the report in comments.
    pub config: String,
    /// Paths of the keys that the config sets, such as `backends[0].url`.
    pub keys: Vec<String>,
    /// Number of settings whose value was carried over.
    pub carried: usize,
    /// Number of settings that the report or a comment has instead.
    pub left: usize,
    /// Values that are comments because they would be refused, with their places and the reason.
    pub refused: Vec<String>,
    /// Settings that the table does not have, with their places.
    pub unknown: Vec<String>,
    /// Keys that are missing.
    pub incomplete: Vec<String>,
}

impl ImportKind {
    fn table(self) -> &'static Table {
        match self {
            Self::Aibrix => &AIBRIX,
            Self::Smg => &SMG,
            Self::VllmRouter => &VLLM_ROUTER,
            Self::Epp => &EPP,
        }
    }

    /// Describes the files that are read.
    fn expected(self) -> &'static str {
        match self {
            Self::Aibrix => "lines NAME=VALUE, or YAML with `env` in a file named *.yaml",
            Self::Smg => {
                "a command with `smg` or `sglang_router.launch_router`, flags alone, or a \
                          container in a file named *.yaml"
            }
            Self::VllmRouter => {
                "a command with `vllm-router`, flags alone, or a container in a file \
                                 named *.yaml"
            }
            Self::Epp => "plugins and profiles",
        }
    }

    fn read(self, name: &str, text: &str) -> Result<Found, Fault> {
        let endings = [".yaml", ".yml"];
        let is_yaml = match name == STDIN {
            true => yaml::is_likely(text),
            false => endings.iter().any(|ending| name.ends_with(ending)),
        };
        let programs = &self.table().programs;
        match (self, is_yaml) {
            (Self::Aibrix, true) => words::environments(text, programs),
            (Self::Aibrix, false) => words::env_file(text),
            (Self::Smg | Self::VllmRouter, true) => words::containers(text, programs),
            (Self::Smg | Self::VllmRouter, false) => words::script(text, programs),
            (Self::Epp, _) => epp::read(text),
        }
    }
}

/// Makes a config from files of another router.
///
/// # Errors
/// A file cannot be read, or has a value of the wrong type.
pub fn import(kind: ImportKind, files: &[PathBuf]) -> Result<Imported, ConfigErrors> {
    let texts = files.iter().map(|path| read_file(path));
    import_texts(kind, &texts.collect::<Result<Vec<_>, _>>()?)
}

/// Makes a config from files with these names and texts.
fn import_texts(kind: ImportKind, files: &[(String, String)]) -> Result<Imported, ConfigErrors> {
    let mut draft = Draft::new(kind.table());
    for (name, text) in files {
        let mut read = || {
            let text = text.strip_prefix('\u{feff}').unwrap_or(text);
            let found = kind.read(name, text)?;
            if found.settings.is_empty() {
                return Err(Fault::new(1, "no setting is in the file", kind.expected()));
            }
            for (line, what) in found.unread {
                draft.leave(Reason::Unread, &format!("{name}:{line}"), &what);
            }
            let mut settings = found.settings.iter();
            settings.try_for_each(|setting| draft.add(name, setting))
        };
        read().map_err(|fault| fault.in_file(name))?;
    }
    let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
    Ok(draft.finish(&names.join(", ")))
}

fn read_file(path: &Path) -> Result<(String, String), ConfigErrors> {
    let name = path.display().to_string();
    let text = match name == STDIN {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(path),
    };
    match text {
        Ok(text) => Ok((name, text)),
        Err(error) => {
            let error = ConfigError {
                message: format!("read {name}: {error}"),
                expected: "a text file".to_owned(),
                place: Place::Nowhere,
            };
            Err(ConfigErrors::new(name, String::new(), vec![error]))
        }
    }
}

impl Fault {
    /// Returns the fault as an error at its line, without the line's text: it may have secrets.
    fn in_file(self, name: &str) -> ConfigErrors {
        let at = self.line.saturating_sub(1);
        let error = ConfigError {
            message: self.message,
            expected: self.expected,
            place: Place::File(at..at),
        };
        ConfigErrors::new(name.to_owned(), "\n".repeat(self.line), vec![error])
    }
}
