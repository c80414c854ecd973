//! Shared code of commands that show a replica's knowledge.

use std::process::ExitCode;

use api::base::printable::{escaped, is_obeyed};
use lab::terminal::{self, FittedTable, column};
use serde_json::Value;

use super::client::AdminTarget;
use super::table::cell;

/// Arguments of all reading commands.
#[derive(Debug, clap::Args)]
pub(super) struct ReadArgs {
    #[command(flatten)]
    pub(super) target: AdminTarget,
    /// Print the response as JSON
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn members(cluster: &Value) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("replica"),
        column("role"),
        column("vote"),
        column("connected"),
        column("lag").number(),
        column("clock skew ms").number().rank(4),
        column("peer").rank(2),
        column("data").rank(1),
        column("admin").rank(1),
        column("version").rank(3),
    ]);
    let empty = serde_json::Map::new();
    for (id, member) in cluster["members"].as_object().unwrap_or(&empty) {
        let role = match member["is_voter"].as_bool() {
            _ if cell(&cluster["leader"]) == *id => "leader",
            Some(true) => "follower",
            Some(false) => "learner",
            None => "-",
        };
        let connected = match member["silent_ms"].as_u64() {
            Some(ms) => format!("no, for {} s", ms / 1000),
            None => cell(&member["is_connected"]),
        };
        let labels = &member["labels"];
        table.add_row([
            id.clone(),
            role.to_owned(),
            cell(&member["is_voter"]),
            connected,
            cell(&member["lag"]),
            cell(&member["clock_skew_ms"]),
            cell(&member["peer"]),
            cell(&labels["data"]),
            cell(&labels["admin"]),
            cell(&labels["version"]),
        ]);
    }
    table
}

/// Formats what remains of a user's limits and budgets; `-` if the user has none.
pub(super) fn limits(user: &Value) -> String {
    let left = &user["left"];
    let parts = [
        ("requests", "requests"),
        ("tokens", "tokens"),
        ("concurrent", "at once"),
    ];
    let shown: Vec<String> = parts
        .iter()
        .filter(|(name, _)| !left[name].is_null())
        .map(|(name, words)| format!("{} {words} left", cell(&left[name])))
        .collect();
    let budgets = ["day", "month"].into_iter().filter_map(|period| {
        let left = &user["budget_left"][period]["left"];
        (!left.is_null()).then(|| format!("{} tokens left this {period}", cell(left)))
    });
    let shown: Vec<String> = shown.into_iter().chain(budgets).collect();
    if shown.is_empty() {
        "-".to_owned()
    } else {
        shown.join(", ")
    }
}

/// Lists the fields of a response, one per line. Fields of nested objects are named `object.field`,
/// and those of objects in a list `list[0].field`.
pub(super) fn details(answer: &Value) -> String {
    let mut lines = Vec::new();
    fields("", answer, &mut lines);
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines = lines
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}"));
    lines.collect::<Vec<_>>().join("\n")
}

fn fields(prefix: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    if let Value::Array(values) = value
        && values.iter().any(Value::is_object)
    {
        for (nth, value) in values.iter().enumerate() {
            fields(&format!("{prefix}[{nth}]"), value, lines);
        }
        return;
    }
    let Value::Object(object) = value else {
        lines.push((prefix.to_owned(), cell(value)));
        return;
    };
    for (name, value) in object {
        let name = escaped(name);
        let path = match prefix {
            "" => name.into_owned(),
            prefix => format!("{prefix}.{name}"),
        };
        fields(&path, value, lines);
    }
}

/// Formats thousandths as a decimal number.
pub(super) fn thousandths(value: &Value) -> String {
    match value.as_u64() {
        Some(milli) if milli % 1000 == 0 => (milli / 1000).to_string(),
        Some(milli) => format!("{}.{:03}", milli / 1000, milli % 1000),
        None => cell(value),
    }
}

/// Replaces every character that a terminal would interpret, except line breaks, by its JSON
/// escape.
pub(super) fn shown(json: &str) -> String {
    let escape = |c: char| {
        let mut units = [0; 2];
        let units = c.encode_utf16(&mut units).iter();
        units
            .map(|unit| format!("\\u{unit:04x}"))
            .collect::<String>()
    };
    let is_layout = |c: char| c == '\n';
    let each = |c: char| match is_obeyed(c) && !is_layout(c) {
        true => escape(c),
        false => c.to_string(),
    };
    match json.contains(|c| is_obeyed(c) && !is_layout(c)) {
        true => json.chars().map(each).collect(),
        false => json.to_owned(),
    }
}

pub(super) fn print_json(value: &Value) -> anyhow::Result<ExitCode> {
    terminal::print(json_text(value)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Formats a response as JSON for programs.
pub(super) fn json_text(value: &Value) -> anyhow::Result<String> {
    Ok(shown(&serde_json::to_string_pretty(value)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_output_is_equal_json_without_control_characters() {
        let hostile = json!({ "name": "a\u{9b}2J\u{202e}\u{7f}\u{e0041}\n" });
        let text = serde_json::to_string_pretty(&hostile).unwrap();
        let shown = shown(&text);
        assert!(!shown.contains(|c| is_obeyed(c) && c != '\n'), "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), hostile);
    }

    #[test]
    fn details_list_each_value_by_its_path() {
        let answer = json!({ "id": "a", "state": { "name": "healthy", "detail": null }, "n": [1, 2],
                "m": [{ "id": "x" }, { "id": "y" }] });
        let lines = [
            "id            a",
            "state.name    healthy",
            "state.detail  -",
            "n             1, 2",
            "m[0].id       x",
            "m[1].id       y",
        ];
        assert_eq!(details(&answer), lines.join("\n"));
    }

    #[test]
    fn thousandths_are_shown_as_decimals_if_needed() {
        assert_eq!(thousandths(&json!(2000)), "2");
        assert_eq!(thousandths(&json!(1050)), "1.050");
        assert_eq!(thousandths(&Value::Null), "-");
    }
}
