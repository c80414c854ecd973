//! Formats JSON values as table cells.

use api::base::printable::escaped;
use serde_json::Value;

/// Formats a JSON value as one cell: strings without quotes, lists with commas, empty values as a
/// dash.
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

/// Formats a number of per cent; other values as [`cell`] does.
pub(super) fn percent(value: &Value) -> String {
    match value.as_f64() {
        Some(percent) => format!("{percent:.1} %"),
        None => cell(value),
    }
}

/// Formats a number of milliseconds; other values as [`cell`] does.
pub(super) fn millis(value: &Value) -> String {
    match value.as_f64() {
        Some(ms) if ms != 0.0 && ms < 1.0 => format!("{ms:.3} ms"),
        Some(ms) => format!("{ms:.1} ms"),
        None => cell(value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_cell_escapes_control_characters() {
        let hostile = json!(["\x1b]0;x\x07", {"a\nb": "\u{202e}c"}]);
        assert_eq!(cell(&hostile), r"\u{1b}]0;x\u{7}, a\u{a}b=\u{202e}c");
        assert_eq!(cell(&json!("ada")), "ada");
    }
}
