//! Checks where the access log is written.

use std::path::{Path, PathBuf};

use api::prompt::TokenizerSpec;
use serde_json::Value;

use super::file::ConfigFile;
use super::read::Settings;
use super::traffic::AccessFormat;

/// Rejects a file that is in the data directory or that another key names, and a format without a
/// file.
pub(super) fn check_access_file(file: &ConfigFile, found: &mut Settings) {
    let path = "log.access_file";
    let Some(access_file) = &file.log.access_file else {
        let key = "log.access_format";
        if file.log.access_format != AccessFormat::default() {
            let message =
                format!("{key} has another value than its default, and {path} is not set");
            found.refuse(key, message, "log.access_file, whose format it is");
        }
        return;
    };
    if !found.is_sound(path) || !found.is_sound("node.data_dir") {
        return;
    }
    let told = real(access_file);
    if told.starts_with(real(&file.node.data_dir)) {
        let (told, folder) = (access_file.display(), file.node.data_dir.display());
        let message = format!("{path} is {told:?}, in node.data_dir, {folder:?}");
        found.refuse(
            path,
            message,
            "a file outside node.data_dir, which is reserved for the store",
        );
    } else if files(file).any(|other| real(&other) == told) {
        let message = format!(
            "{path} is {:?}, which another key names",
            access_file.display()
        );
        found.refuse(path, message, "a file that is used for nothing else");
    }
}

/// Returns the files that other keys of the config name. They are read and never written.
fn files(file: &ConfigFile) -> impl Iterator<Item = PathBuf> {
    let mut paths = Vec::new();
    let values = serde_json::to_value(file).unwrap_or_default();
    add_files("", &values, &mut paths);
    paths.into_iter()
}

/// Adds the values of keys below `path` that name files, except `log.access_file`.
fn add_files(path: &str, value: &Value, paths: &mut Vec<PathBuf>) {
    match value {
        Value::String(text) if path != ".log.access_file" => {
            let key = path.rsplit('.').next().unwrap_or_default();
            let file = match key {
                "tokenizer" => match text.parse() {
                    Ok(TokenizerSpec::HuggingFace(file) | TokenizerSpec::EngineOr(file)) => {
                        Some(file)
                    }
                    Ok(_) | Err(_) => None,
                },
                "path" | "chat_template" => Some(text.into()),
                key => key.ends_with("file").then(|| text.into()),
            };
            paths.extend(file);
        }
        Value::Array(entries) => entries.iter().for_each(|it| add_files(path, it, paths)),
        Value::Object(keys) => {
            for (key, value) in keys {
                add_files(&format!("{path}.{key}"), value, paths);
            }
        }
        _ => {}
    }
}

/// Returns a path that is equal for equal files. The file and its folders need not exist.
fn real(path: &Path) -> PathBuf {
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (absolute.parent(), absolute.file_name()) {
        (Some(folder), Some(name)) => real(folder).join(name),
        _ => absolute,
    }
}
