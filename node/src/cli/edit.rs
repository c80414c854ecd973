//! Shared code of commands that write through the admin API.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use api::files::text::read_text;
use lab::terminal;
use serde_json::Value;

use super::client::AdminTarget;
use super::read::print_json;

/// Arguments of all writing commands.
#[derive(Debug, clap::Args)]
pub(super) struct WriteArgs {
    #[command(flatten)]
    pub(super) target: AdminTarget,
    /// Print the response as JSON
    #[arg(long)]
    pub(super) json: bool,
}

impl WriteArgs {
    /// Prints what was done and at which log index, or the response as JSON.
    pub(super) fn done(&self, what: &str, answer: &Value) -> anyhow::Result<ExitCode> {
        if self.json {
            return print_json(answer);
        }
        match &answer["index"] {
            Value::Null => terminal::print(what)?,
            index => terminal::print(format_args!("{what} (log index {index})"))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Reads text from a file, or from stdin if it is `-`.
pub(super) fn text(path: &Path) -> anyhow::Result<String> {
    if path.as_os_str() != "-" {
        return read_text(path).with_context(|| format!("read {}", path.display()));
    }
    let mut text = String::new();
    let read = std::io::stdin().read_to_string(&mut text);
    read.context("read stdin")?;
    Ok(text)
}

/// Reads JSON from a file, or from stdin if it is `-`.
pub(super) fn document(path: &Path) -> anyhow::Result<Value> {
    let read = serde_json::from_str(&text(path)?);
    read.with_context(|| format!("read {}: not JSON", path.display()))
}

/// Parses `key=value`. A value that is not valid JSON is a string.
pub(super) fn setting(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
    Ok((key.trim().to_owned(), value))
}

/// Sets the value at a dotted path such as `limits.tokens`.
pub(super) fn put(document: &mut Value, path: &str, value: Value) {
    let mut at = document;
    for part in path.split('.') {
        if !at.is_object() {
            *at = Value::Object(serde_json::Map::new());
        }
        at = &mut at[part];
    }
    *at = value;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_parse_as_json_or_else_text() {
        let read = |text| setting(text).unwrap();
        assert_eq!(read("max_wait=10s"), ("max_wait".to_owned(), json!("10s")));
        assert_eq!(read("a=3"), ("a".to_owned(), json!(3)));
        assert_eq!(read("a = b").1, json!(" b"));
        assert_eq!(read("a=null").1, Value::Null);
        assert_eq!(read("a=b=c").1, json!("b=c"));
        assert!(setting("a").is_err());
    }

    #[test]
    fn an_edit_path_descends_into_objects() {
        let mut document = json!({ "a": { "b": 1, "c": 2 }, "d": null });
        put(&mut document, "a.b", json!(3));
        put(&mut document, "d.e", json!("x"));
        assert_eq!(
            document,
            json!({ "a": { "b": 3, "c": 2 }, "d": { "e": "x" } })
        );
    }
}
