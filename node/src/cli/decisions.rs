//! `quorate decisions` and `quorate explain --request-id`: show past decisions of replicas.

use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::{AdminTarget, encoded};
use super::read::print_json;
use super::table::{cell, millis, percent};

/// Arguments of `quorate decisions`.
#[derive(Debug, clap::Args)]
pub(super) struct DecisionsArgs {
    /// Only requests of this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Only requests that went to this backend
    #[arg(long, value_name = "ID")]
    backend: Option<String>,
    /// Only requests for this model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Only requests that failed
    #[arg(long)]
    failed: bool,
    /// Only requests that were answered with this HTTP status
    #[arg(long, value_name = "N")]
    status: Option<u16>,
    /// Only requests that took longer, such as `2s` or `500ms`
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    slower_than: Option<String>,
    /// Maximum number of requests
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    #[command(flatten)]
    target: AdminTarget,
    /// Print the response as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `quorate decisions`.
pub(super) async fn list(args: DecisionsArgs) -> anyhow::Result<ExitCode> {
    let path = path(&args);
    let answer = args.target.get(&path).await?;
    if args.json {
        return print_json(&answer);
    }
    let mut table = FittedTable::new(&[
        column("time").rank(3),
        column("request"),
        column("replica").number().rank(4),
        column("user").rank(2),
        column("model").rank(5),
        column("blocks").number().rank(1),
        column("policy").rank(5),
        column("backend"),
        column("reason").rank(4),
        column("tries").number().rank(5),
        column("waited ms").number().rank(4),
        column("status").number(),
        column("cached").number().rank(4),
        column("TTFT ms").number().rank(3),
        column("took ms").number().rank(3),
        column("end").rank(2),
    ]);
    let decisions = answer["decisions"].as_array();
    for request in decisions.map_or(&[][..], Vec::as_slice) {
        let last = &request["last"];
        let blocks = format!(
            "{}/{}",
            cell(&last["matched"]),
            cell(&request["blocks_total"])
        );
        table.add_row([
            time(&request["at_ms"]),
            cell(&request["request_id"]),
            cell(&request["replica"]),
            cell(&request["user"]),
            cell(&request["model"]),
            blocks,
            cell(&last["policy"]),
            cell(&last["backend"]),
            cell(&last["reason"]),
            cell(&request["attempts"]),
            cell(&last["waited_ms"]),
            cell(&request["end"]["status"]),
            cell(&last["usage"]["cached_tokens"]),
            cell(&last["ttft_ms"]),
            cell(&request["end"]["duration_ms"]),
            ended(&request["end"]),
        ]);
    }
    terminal::print(format_args!(
        "replica {} keeps {}\n\n{table}",
        cell(&answer["replica"]),
        kept(&answer)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the path of the call, with the filters.
fn path(args: &DecisionsArgs) -> String {
    let mut path = format!("/admin/v1/decisions?limit={}", args.limit);
    let filters = [
        ("user", &args.user),
        ("backend", &args.backend),
        ("model", &args.model),
        ("failed", &args.failed.then(|| "true".to_owned())),
        ("status", &args.status.map(|status| status.to_string())),
        ("slower_than", &args.slower_than),
    ];
    for (name, value) in filters {
        if let Some(value) = value {
            path.push_str(&format!("&{name}={}", encoded(value)));
        }
    }
    path
}

/// Describes what the replica keeps, and what hinders it.
fn kept(answer: &Value) -> String {
    let disk = &answer["disk"];
    let own = || format!("the last {} of its own requests", cell(&answer["kept"]));
    match (disk, &disk["fault"]) {
        (Value::Null, _) => own(),
        (disk, Value::Null) => format!(
            "{} of at most {} MiB of all replicas' decisions on disk",
            mebibytes(&disk["bytes"]),
            mebibytes(&disk["bytes_max"])
        ),
        (_, fault) => format!("{}, because its disk fails: {}", own(), cell(fault)),
    }
}

fn mebibytes(bytes: &Value) -> u64 {
    bytes.as_u64().unwrap_or_default().div_ceil(1 << 20)
}

/// Checks that `text` is a duration.
fn duration(text: &str) -> Result<String, String> {
    let parsed = humantime::parse_duration(text);
    parsed.map(|_| text.to_owned()).map_err(|it| it.to_string())
}

/// Runs `quorate explain --request-id`.
pub(super) async fn show(target: AdminTarget, id: &str, is_json: bool) -> anyhow::Result<ExitCode> {
    let path = format!("/admin/v1/decisions/{}", encoded(id));
    let answer = target.get(&path).await?;
    if is_json {
        return print_json(&answer);
    }
    terminal::print(format_args!("{}", shown(&answer)))?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the record of a request as text.
pub(super) fn shown(answer: &Value) -> String {
    let mut lines = vec![
        format!(
            "request  {} at {}, decided by replica {}",
            cell(&answer["request_id"]),
            time(&answer["at_ms"]),
            cell(&answer["replica"])
        ),
        format!(
            "model    {} {}{}",
            cell(&answer["path"]),
            cell(&answer["model"]),
            match &answer["requested_model"] {
                Value::Null => String::new(),
                requested => format!(", requested as {}", cell(requested)),
            }
        ),
        format!(
            "user     {}, by {}; priority {}",
            cell(&answer["user"]),
            cell(&answer["user_source"]),
            cell(&answer["priority"])
        ),
        format!("session  {}", session(&answer["session"])),
        format!(
            "prompt   {} tokens, {} blocks",
            cell(&answer["tokens"]),
            cell(&answer["blocks_total"])
        ),
        format!(
            "end      {}, status {}, {} ms",
            ended(&answer["end"]),
            cell(&answer["end"]["status"]),
            cell(&answer["end"]["duration_ms"])
        ),
    ];
    let decisions = answer["decisions"].as_array();
    let decisions = decisions.map_or(&[][..], Vec::as_slice);
    if decisions.is_empty() {
        lines.push("choice   none: no backend was chosen for it".to_owned());
    }
    for (number, decision) in decisions.iter().enumerate() {
        lines.extend(attempt(number + 1, decision));
    }
    lines.join("\n")
}

/// Formats the session of a request.
fn session(named: &Value) -> String {
    if named.is_null() {
        return "none".to_owned();
    }
    let mut text = format!(
        "{}, named by {}",
        cell(&named["id"]),
        cell(&named["source"])
    );
    if let Value::String(parent) = &named["parent"] {
        text += &format!("; started by {parent}");
    }
    text
}

/// Formats an attempt as lines of text and a table of its candidates.
fn attempt(number: usize, decision: &Value) -> [String; 5] {
    let outcome = &decision["outcome"];
    let usage = &outcome["usage"];
    let mut table = FittedTable::new(&[
        column("backend"),
        column("verdict"),
        column("matched").number(),
        column("running").number().rank(1),
        column("prefill").number().rank(2),
        column("engine queue").number().rank(2),
        column("KV use").number().rank(3),
        column("free").number().rank(4),
        column("tier").number().rank(4),
        column("score").number(),
        column("then").number().rank(4),
    ]);
    for backend in decision["backends"]
        .as_array()
        .map_or(&[][..], Vec::as_slice)
    {
        table.add_row([
            cell(&backend["id"]),
            cell(&backend["verdict"]),
            cell(&backend["matched"]),
            cell(&backend["running"]),
            cell(&backend["pending_prefill_tokens"]),
            cell(&backend["engine_waiting"]),
            percent(&backend["kv_usage_percent"]),
            cell(&backend["free_blocks"]),
            cell(&backend["tier"]),
            score(&decision["policy"], &backend["score"]),
            cell(&backend["then"]),
        ]);
    }
    let prefill = prefill(decision);
    [
        format!(
            "\nattempt  {number}: {}, by {}, {} blocks held; waited {} ms{prefill}",
            cell(&decision["choice"]),
            cell(&decision["reason"]),
            cell(&decision["matched"]),
            cell(&decision["waited_ms"]),
        ),
        format!(
            "policy   {}, named by the {}, at index {}",
            cell(&decision["policy"]["policy"]),
            cell(&decision["policy_source"]),
            cell(&decision["index"])
        ),
        format!(
            "engine   status {}, {}; {}{} ms in all",
            cell(&decision["status"]),
            match &decision["failure"] {
                Value::Null => cell(&outcome["end"]),
                failure => cell(failure),
            },
            match &outcome["ttft_ms"] {
                Value::Null => String::new(),
                ms => format!("first token after {} ms, ", cell(ms)),
            },
            cell(&outcome["duration_ms"]),
        ),
        format!(
            "tokens   prompt {}, of these cached {}, output {}",
            cell(&usage["prompt_tokens"]),
            cell(&usage["cached_tokens"]),
            cell(&usage["completion_tokens"])
        ),
        table.to_string(),
    ]
}

/// Formats a score. That of `cost` is a time in nanoseconds.
pub(super) fn score(policy: &Value, score: &Value) -> String {
    match score.as_f64() {
        Some(ns) if policy["policy"] == "cost" => millis(&json!(ns / 1e6)),
        _ => cell(score),
    }
}

/// Describes the choice of another backend to compute the prompt; empty if there was none.
fn prefill(decision: &Value) -> String {
    match &decision["prefill"] {
        Value::Null => String::new(),
        prefill => format!(
            "; its prompt by {}, by {}, {} blocks held, {}",
            cell(&prefill["choice"]),
            cell(&prefill["reason"]),
            cell(&prefill["matched"]),
            cell(&decision["prefill_outcome"]),
        ),
    }
}

fn ended(end: &Value) -> String {
    match (&end["outcome"], &end["code"]) {
        (Value::Null, _) => "under way".to_owned(),
        (outcome, Value::Null) => cell(outcome),
        (outcome, code) => format!("{} ({})", cell(outcome), cell(code)),
    }
}

/// Formats Unix milliseconds as a timestamp.
pub(super) fn time(ms: &Value) -> String {
    let at = ms.as_u64().map(Duration::from_millis);
    let at = at.and_then(|since| UNIX_EPOCH.checked_add(since));
    at.map_or_else(
        || cell(ms),
        |at| humantime::format_rfc3339_millis(at).to_string(),
    )
}
