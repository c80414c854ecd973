//! Keeps docs/reference/config.md equal to the key table. Regenerate it with `UPDATE_EXPECT=1 cargo
//! test -p node reference`.

use std::fmt::Write;

use expect_test::expect_file;

use super::key::{Absent, Key};
use super::keys::{BACKEND_KEYS, KEYS, MODEL_KEYS};

const INTRODUCTION: &str = "# Configuration

A replica reads one TOML file: `quorate serve --config FILE`.
Each value comes from the first of these that sets it:

1. a flag, `--set section.key=value`
2. an environment variable, `QUORATE_SECTION__KEY` (`-` becomes `_`, lists are separated by commas)
3. the file
4. the default

Unknown keys are errors.
Lists of tables (`[[models]]`, `[[backends]]`) can only be set in the file.

`quorate config check` reports every mistake at once, `quorate config print` shows each effective value and where it comes from, and `quorate config schema` prints a JSON Schema for editors.
This page is made from the same table as all three.
";

fn rows(out: &mut String, keys: &[&Key]) {
    out.push_str("\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n");
    for key in keys {
        let (_, name) = key.split();
        let expected = match key.kind {
            kind if kind.is_list() => format!("a list, each {}", kind.expected()),
            kind => kind.expected(),
        };
        let absent = match key.absent {
            Absent::Required => "must be set".to_owned(),
            Absent::Unset => "none".to_owned(),
            Absent::Default(text) => format!("`{text}`"),
        };
        writeln!(out, "| `{name}` | {expected} | {absent} | {} |", key.about).unwrap();
    }
}

#[test]
fn the_reference_says_what_the_key_table_says() {
    let mut page = INTRODUCTION.to_owned();
    let mut sections: Vec<&str> = Vec::new();
    for (section, _) in KEYS.iter().map(Key::split) {
        if !sections.contains(&section) {
            sections.push(section);
        }
    }
    for section in sections {
        let keys = KEYS.iter().filter(|key| key.split().0 == section);
        writeln!(page, "\n## `[{section}]`").unwrap();
        rows(&mut page, &keys.collect::<Vec<_>>());
    }
    for (list, keys) in [("models", MODEL_KEYS), ("backends", BACKEND_KEYS)] {
        writeln!(page, "\n## `[[{list}]]`").unwrap();
        rows(&mut page, &keys.iter().collect::<Vec<_>>());
    }
    expect_file!["../../../docs/reference/config.md"].assert_eq(&page);
}
