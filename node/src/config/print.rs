//! `config print`: the effective config as a config file, with where each value came from.

use std::fmt::Write;

use super::Loaded;
use super::key::Key;
use super::keys::{BACKEND_KEYS, KEYS, MODEL_KEYS};
use super::layers::{Entry, Setting, Source};

/// Column that the sources stand in.
const SOURCE_COLUMN: usize = 56;

/// The effective config as TOML. Reading it again gives the same config.
#[must_use]
pub fn print(loaded: &Loaded) -> String {
    let mut out = String::new();
    let mut section = "";
    for key in KEYS {
        let (of, name) = key.split();
        if of != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            line(&mut out, format_args!("{gap}[{of}]"));
            section = of;
        }
        setting(
            &mut out,
            &loaded.file,
            name,
            loaded.settings.values.get(key.path),
        );
    }
    entries(
        &mut out,
        &loaded.file,
        "models",
        MODEL_KEYS,
        &loaded.settings.models,
    );
    entries(
        &mut out,
        &loaded.file,
        "backends",
        BACKEND_KEYS,
        &loaded.settings.backends,
    );
    out
}

fn entries(out: &mut String, file: &str, list: &str, keys: &[Key], entries: &[Entry]) {
    for entry in entries {
        line(out, format_args!("\n[[{list}]]"));
        for key in keys {
            setting(out, file, key.path, entry.values.get(key.path));
        }
    }
}

fn setting(out: &mut String, file: &str, name: &str, setting: Option<&Setting>) {
    let Some(Setting { value, source }) = setting else {
        line(out, format_args!("# {name} is not set"));
        return;
    };
    let source = match source {
        Source::Default => "default".to_owned(),
        Source::File { line, .. } => format!("{file}:{line}"),
        Source::Variable(name) => name.clone(),
        Source::Flag(flag) => format!("--set {flag}"),
    };
    let assignment = format!("{name} = {value}");
    line(out, format_args!("{assignment:<SOURCE_COLUMN$} # {source}"));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("writing to a String cannot fail");
}
