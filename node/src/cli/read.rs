//! `quorate status`, and shared code of commands that show a replica's knowledge.

use std::process::ExitCode;

use api::base::printable::{escaped, is_obeyed};
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::table::cell;

/// Maximum number of a source's rejected engines that `status` shows.
const REFUSED_SHOWN: usize = 5;

/// Arguments of all reading commands.
#[derive(Debug, clap::Args)]
pub(super) struct ReadArgs {
    #[command(flatten)]
    pub(super) target: AdminTarget,
    /// Print the response as JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Runs `quorate status`. For a replica that is not ready, shows its status and fails.
pub(super) async fn status(args: &ReadArgs) -> anyhow::Result<(String, ExitCode)> {
    let cluster = args.target.get("/admin/v1/cluster").await?;
    let digest = args.target.get("/admin/v1/digest").await?;
    let readiness = args.target.readiness().await?;
    let defaults = args.target.get("/admin/v1/users/defaults").await?;
    let discovery = args.target.get("/admin/v1/discovery").await?;
    let code = match readiness["status"].as_str() {
        Some("ready" | "degraded") => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    };
    if args.json {
        let all = json!({
            "cluster": cluster, "digest": digest, "readiness": readiness,
            "user_defaults": defaults, "discovery": discovery,
        });
        return Ok((json_text(&all)?, code));
    }
    let found = cluster["peers"].as_array().filter(|it| !it.is_empty());
    let reasons = readiness["reasons"].as_array().into_iter().flatten();
    // The table has more detail about peers.
    let reasons = reasons.filter(|it| found.is_none() || !is_of_peer(it));
    let warnings = readiness["warnings"].as_array().into_iter().flatten();
    let reasons: Vec<String> = reasons
        .chain(warnings)
        .map(|reason| format!("\n{}", terminal::indented(&cell(reason), 9)))
        .collect();
    let lines = [
        format!(
            "replica {} is {} in term {}, version {}",
            cell(&cluster["id"]),
            cell(&cluster["role"]),
            cell(&cluster["term"]),
            cell(&cluster["version"]),
        ),
        format!(
            "state    {}{}",
            cell(&readiness["status"]),
            reasons.concat()
        ),
        format!("cluster  {}", cell(&cluster["cluster_id"])),
        format!("leader   {}", cell(&cluster["leader"])),
        format!("quorum   {}", cell(&cluster["has_quorum"])),
        format!(
            "index    committed {}, applied {}, snapshot {}",
            cell(&cluster["committed_index"]),
            cell(&cluster["applied_index"]),
            cell(&cluster["snapshot_index"]),
        ),
        format!(
            "digest   {} at {}",
            cell(&digest["digest"]),
            cell(&digest["index"])
        ),
    ];
    let mut lines = Vec::from(lines);
    lines.extend(unsalted(&defaults).into_iter().chain(sources(&discovery)));
    let has_members = cluster["members"]
        .as_object()
        .is_some_and(|it| !it.is_empty());
    let members = has_members.then(|| members(&cluster));
    let tables = members.into_iter().chain(found.map(|found| peers(found)));
    let tables: Vec<_> = tables.map(|table| table.to_string()).collect();
    let text = format!("{}\n\n{}", lines.join("\n"), tables.join("\n\n"));
    Ok((text, code))
}

/// Lists the engines that do not isolate users' caches, if users may be isolated.
fn unsalted(defaults: &Value) -> Option<String> {
    let backends = defaults["unsalted_backends"].as_array()?;
    let is_asked = defaults["config"]["cache"] != "shared"
        || defaults["users_with_own_cache"].as_u64() > Some(0);
    if backends.is_empty() || !is_asked {
        return None;
    }
    let names: Vec<String> = backends.iter().map(cell).collect();
    let told = format!(
        "{}: the engines ignore `cache_salt`, or are not known to support it",
        names.join(", ")
    );
    Some(format!(
        "unsalted {}",
        terminal::indented(&told, 9).trim_start()
    ))
}

/// Returns one line per source of engines, followed by its problems.
fn sources(discovery: &Value) -> Vec<String> {
    let all = |name: &str| discovery[name].as_array().into_iter().flatten();
    let mut lines = Vec::new();
    for source in all("sources") {
        let count = |name: &str| source[name].as_u64().unwrap_or(0);
        let mut line = format!(
            "source   {}: {} engines listed, {} registered",
            cell(&source["id"]),
            count("told"),
            count("registered"),
        );
        for (name, words) in [
            ("lost", "lost"),
            ("withheld", "kept though not listed"),
            ("refused_total", "refused"),
        ] {
            if count(name) > 0 {
                line += &format!(", {} {words}", count(name));
            }
        }
        lines.push(line);
        let faults = [("error", "no response: "), ("failure", "not changed: ")];
        for (name, words) in faults {
            if !source[name].is_null() {
                lines.push(format!("         {words}{}", cell(&source[name])));
            }
        }
        let refused = source["refused"].as_array().into_iter().flatten();
        for refused in refused.take(REFUSED_SHOWN) {
            let (engine, reason) = (cell(&refused["engine"]), cell(&refused["reason"]));
            lines.push(format!("         {engine}: {reason}"));
        }
    }
    let orphans: Vec<String> = all("orphans").map(|it| cell(&it["backend"])).collect();
    if !orphans.is_empty() {
        let told = orphans.join(", ");
        lines.push(format!(
            "orphans  {told}: registered by sources that this replica does not have"
        ));
    }
    lines
}

/// Whether the reason for which a replica is not ready concerns one peer.
fn is_of_peer(reason: &Value) -> bool {
    reason.as_str().is_some_and(|it| it.starts_with("peer "))
}

/// Returns a table of what a replica without a quorum found at the addresses of its peers.
fn peers(found: &[Value]) -> FittedTable {
    let columns = [column("peer"), column("found"), column("detail").prose()];
    let mut table = FittedTable::new(&columns);
    for peer in found {
        table.add_row([&peer["address"], &peer["state"], &peer["detail"]].map(cell));
    }
    table
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
        let role = if cell(&cluster["leader"]) == *id {
            "leader"
        } else {
            "-"
        };
        let labels = &member["labels"];
        table.add_row([
            id.clone(),
            role.to_owned(),
            cell(&member["is_voter"]),
            cell(&member["is_connected"]),
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

    #[test]
    fn unsalted_engines_are_named_if_isolation_needs_salts() {
        let cache = |cache: &str, users: u64, backends: Value| json!({ "config": { "cache": cache }, "users_with_own_cache": users, "unsalted_backends": backends });
        let all = || json!(["a", "b"]);
        assert_eq!(unsalted(&cache("shared", 0, all())), None);
        assert_eq!(unsalted(&cache("isolated", 0, json!([]))), None);
        for cache in [cache("group:a", 0, all()), cache("shared", 1, all())] {
            let told = unsalted(&cache).unwrap();
            assert!(told.starts_with("unsalted a, b: "), "{told}");
        }
    }
}
