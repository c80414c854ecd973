//! Results as tables: one look for all commands, plain when stdout is no terminal.

use std::io::IsTerminal;

use api::shown::escaped;
use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

/// An empty table with these column heads.
pub(crate) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    let is_terminal = std::io::stdout().is_terminal();
    table.load_preset(if is_terminal {
        presets::UTF8_HORIZONTAL_ONLY
    } else {
        presets::NOTHING
    });
    if is_terminal {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(heads);
    table
}

/// A JSON value as one cell: texts without quotes, lists with commas, nothing as a dash.
pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => escaped(text).into_owned(),
        Value::Array(values) if values.is_empty() => "-".to_owned(),
        Value::Array(values) => values.iter().map(cell).collect::<Vec<_>>().join(", "),
        Value::Object(fields) if fields.is_empty() => "-".to_owned(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| format!("{}={}", escaped(name), cell(value)));
            fields.collect::<Vec<_>>().join(" ")
        }
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Number(number) => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_cell_obeys_nobody() {
        let hostile = json!(["\x1b]0;x\x07", {"a\nb": "\u{202e}c"}]);
        assert_eq!(cell(&hostile), r"\u{1b}]0;x\u{7}, a\u{a}b=\u{202e}c");
        assert_eq!(cell(&json!("ada")), "ada");
    }
}
