//! Keeps docs/reference/config.md equal to the structs of a config file. Regenerate it with
//! `UPDATE_EXPECT=1 cargo test -p node reference`.

use std::fmt::Write;

use expect_test::expect_file;
use serde_json::Value;

use super::schema::{SCHEMA, Section, expected, is_basic, properties, sections, table};

const INTRODUCTION: &str = "# Configuration

A replica reads one TOML file: `quorate serve --config FILE`.
Each value comes from the first of these that sets it:

1. a flag, `--set section.key=value`
2. an environment variable, `QUORATE_SECTION__KEY` (`-` becomes `_`, lists are separated by commas)
3. the file
4. the default

Unknown keys are errors.
Variables without `__` are ignored, because orchestrators set such ones, unless they look like a key.
Lists of tables (`[[models]]`, `[[splits]]`, `[[backends]]`, `[[discovery]]`, `[[prices]]`) can only be set in the file; `quorate serve --backend URL` adds backends.

Most keys can stay as they are.
A first production cluster needs those marked **basic**; `quorate config print --basic` prints them, with their descriptions, as a file to start from.

`quorate config check` reports every mistake at once, `quorate config print` shows each effective value and where it comes from, and `quorate config schema` prints a JSON Schema for editors.
This page is generated from the same source as all three.
";

fn default(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(elements) => elements.iter().map(default).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Returns the description of a section.
fn about(path: &str) -> &'static str {
    let parts = path.split('.');
    let section = parts.fold(&*SCHEMA, |section, part| &section["properties"][part]);
    section["description"].as_str().unwrap()
}

/// Describes the keys of a table.
fn members(entry: &'static Value) -> String {
    let member = |(name, schema): (&String, &'static Value)| {
        let about = schema["description"].as_str().unwrap();
        let default = schema.get("default").filter(|it| it.as_str() != Some(""));
        let default = default.map_or_else(String::new, |it| {
            format!(", default `{}`", self::default(it))
        });
        format!("`{name}` ({}{default}): {about}", expected(schema))
    };
    properties(entry).map(member).collect::<Vec<_>>().join(" ")
}

fn rows(out: &mut String, section: &Section) {
    out.push_str("\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n");
    for (name, schema) in &section.keys {
        let (each, expected) = match (schema["type"] == "array", table(schema)) {
            (true, Some(entry)) => ("a list of tables with ", members(entry)),
            (true, None) => ("a list, each ", expected(schema)),
            (false, _) => ("", expected(schema)),
        };
        let absent = match schema.get("default") {
            Some(value) => format!("`{}`", default(value)),
            None if section.required.contains(&name.as_str()) => "must be set".to_owned(),
            None => "none".to_owned(),
        };
        let about = schema["description"].as_str().unwrap();
        let basic = if is_basic(schema) { "**Basic.** " } else { "" };
        writeln!(
            out,
            "| `{name}` | {each}{expected} | {absent} | {basic}{about} |"
        )
        .unwrap();
    }
}

#[test]
fn the_config_reference_matches_the_structs() {
    let mut page = INTRODUCTION.to_owned();
    for section in sections() {
        match section.is_list {
            false if section.path.is_empty() => writeln!(page, "\n## Outside sections").unwrap(),
            true => writeln!(page, "\n## `[[{}]]`", section.path).unwrap(),
            false => writeln!(page, "\n## `[{}]`", section.path).unwrap(),
        }
        if !section.path.is_empty() {
            writeln!(page, "\n{}", about(&section.path)).unwrap();
        }
        rows(&mut page, &section);
    }
    expect_file!["../../../docs/reference/config.md"].assert_eq(&page);
}
