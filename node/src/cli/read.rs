//! `quorate status`, `backends`, `users`: what a replica knows, as a table or as JSON.

use std::process::ExitCode;

use api::shown::is_obeyed;
use lab::terminal::{self, table};
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::table::cell;

/// What all reading commands take.
#[derive(Debug, clap::Args)]
pub(super) struct ReadArgs {
    #[command(flatten)]
    target: AdminTarget,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `quorate status`. A replica that is not ready is shown, too, and makes the command fail.
pub(super) async fn status(args: ReadArgs) -> anyhow::Result<ExitCode> {
    let cluster = args.target.get("/admin/v1/cluster").await?;
    let digest = args.target.get("/admin/v1/digest").await?;
    let readiness = args.target.readiness().await?;
    let code = match readiness["status"].as_str() {
        Some("ready" | "degraded") => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    };
    if args.json {
        let all = json!({ "cluster": cluster, "digest": digest, "readiness": readiness });
        print_json(&all)?;
        return Ok(code);
    }
    let found = cluster["peers"].as_array().filter(|it| !it.is_empty());
    let reasons = readiness["reasons"].as_array().into_iter().flatten();
    // The table says more of the peers.
    let reasons = reasons.filter(|it| found.is_none() || !is_of_peer(it));
    let reasons: Vec<String> = reasons
        .map(|reason| format!("\n         {}", cell(reason)))
        .collect();
    let hashing = match cluster["hashes_keyed"].as_bool() {
        Some(false) if !cluster["cluster_id"].is_null() => {
            " (blocks hashed without a secret: founded by an earlier build)"
        }
        Some(_) | None => "",
    };
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
        format!("cluster  {}{hashing}", cell(&cluster["cluster_id"])),
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
    let table = found.map_or_else(|| members(&cluster), |found| peers(found));
    terminal::print(format_args!("{}\n\n{table}", lines.join("\n")))?;
    Ok(code)
}

/// Whether a reason against readiness is about one peer.
fn is_of_peer(reason: &Value) -> bool {
    reason.as_str().is_some_and(|it| it.starts_with("peer "))
}

/// What a replica that is in no cluster found at the addresses of its config.
fn peers(found: &[Value]) -> comfy_table::Table {
    let mut table = table(&["peer", "found", "detail"]);
    for peer in found {
        table.add_row([&peer["address"], &peer["state"], &peer["detail"]].map(cell));
    }
    table
}

pub(super) fn members(cluster: &Value) -> comfy_table::Table {
    let heads = [
        "replica",
        "role",
        "vote",
        "connected",
        "lag",
        "clock skew ms",
        "peer",
        "data",
        "admin",
        "version",
    ];
    let mut table = table(&heads);
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

/// Runs `quorate backends`.
pub(super) async fn backends(args: ReadArgs) -> anyhow::Result<ExitCode> {
    let backends = args.target.list("/admin/v1/backends", "backends").await?;
    if args.json {
        return print_json(&Value::Array(backends));
    }
    let mut table = table(&[
        "backend",
        "state",
        "url",
        "models",
        "in flight",
        "(here)",
        "limit",
        "waiting",
        "kv use",
        "owned",
        "capacity",
        "us/token",
        "off",
        "detail",
    ]);
    for backend in backends {
        let served = match &backend["facts"]["models"] {
            Value::Null => &backend["models"],
            asked => asked,
        };
        table.add_row([
            cell(&backend["id"]),
            cell(&backend["state"]["name"]),
            cell(&backend["url"]),
            cell(served),
            cell(&backend["in_flight"]["cluster"]),
            cell(&backend["in_flight"]["here"]),
            cell(&backend["service"]["limit"]),
            cell(&backend["engine"]["waiting"]),
            per_cent(&backend["engine"]["kv_usage_permille"]),
            cell(&backend["owned_blocks"]),
            cell(&backend["capacity"]["blocks"]),
            thousandths(&backend["service"]["learnt"]["prefill_ns_per_token"]),
            per_cent(&backend["service"]["accuracy"]["error_permille"]),
            match &backend["circuit"]["is_open"] {
                Value::Bool(true) => "its circuit is open".to_owned(),
                _ => cell(&backend["state"]["detail"]),
            },
        ]);
    }
    terminal::print(table)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `quorate users`, sorted by usage, highest first.
pub(super) async fn users(args: ReadArgs) -> anyhow::Result<ExitCode> {
    let mut users = args.target.list("/admin/v1/users", "users").await?;
    users.sort_by_key(|user| std::cmp::Reverse(user["counter_milli_tokens"].as_u64()));
    if args.json {
        return print_json(&Value::Array(users));
    }
    let mut table = table(&[
        "user",
        "weight",
        "counter",
        "in flight",
        "waiting",
        "limits",
        "requests",
        "input",
        "cached",
        "output",
        "input 5m",
        "output 5m",
    ]);
    for user in &users {
        let (total, window) = (&user["total"], &user["window"]);
        let name = match user["name"].as_str() {
            Some(name) if !name.is_empty() => cell(&user["name"]),
            _ => cell(&user["key"]),
        };
        table.add_row([
            name,
            thousandths(&user["weight_milli"]),
            thousandths(&user["counter_milli_tokens"]),
            cell(&user["in_flight"]),
            cell(&user["waiting"]["cluster"]),
            limits(user),
            cell(&total["requests"]),
            cell(&total["input_uncached"]),
            cell(&total["input_cached"]),
            cell(&total["output"]),
            cell(&window["input_uncached"]),
            cell(&window["output"]),
        ]);
    }
    terminal::print(table)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the remainder of a user's effective limits, `-` if there are none.
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
    if shown.is_empty() {
        "-".to_owned()
    } else {
        shown.join(", ")
    }
}

/// Formats thousandths as a percentage.
pub(super) fn per_cent(value: &Value) -> String {
    let permille = value.as_f64();
    permille.map_or_else(
        || cell(value),
        |permille| format!("{:.1}%", permille / 10.0),
    )
}

/// Formats thousandths as a decimal number.
pub(super) fn thousandths(value: &Value) -> String {
    match value.as_u64() {
        Some(milli) if milli % 1000 == 0 => (milli / 1000).to_string(),
        Some(milli) => format!("{}.{:03}", milli / 1000, milli % 1000),
        None => cell(value),
    }
}

/// Escapes, in JSON form, every character that a terminal would interpret.
fn shown(json: &str) -> String {
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
    terminal::print(shown(&serde_json::to_string_pretty(value)?))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_the_same_json_and_obeys_nobody() {
        let hostile = json!({ "name": "a\u{9b}2J\u{202e}\u{7f}\u{e0041}\n" });
        let text = serde_json::to_string_pretty(&hostile).unwrap();
        let shown = shown(&text);
        assert!(!shown.contains(|c| is_obeyed(c) && c != '\n'), "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), hostile);
    }

    #[test]
    fn thousandths_are_shown_as_decimals_only_where_needed() {
        assert_eq!(thousandths(&json!(2000)), "2");
        assert_eq!(thousandths(&json!(1050)), "1.050");
        assert_eq!(thousandths(&Value::Null), "-");
    }
}
