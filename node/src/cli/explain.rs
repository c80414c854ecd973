//! `quorate explain`: shows where a request would go and why, without sending it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use api::files::text::read_text;
use http::Method;
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::read::{print_json, thousandths};
use super::table::{cell, percent};
use super::{decisions, everywhere};

/// Arguments of `quorate explain`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("request").required(true).args(["file", "body", "prompt", "request_id"]))]
pub(super) struct ExplainArgs {
    /// File with the request body, `-` for stdin
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// File with the request body, like FILE
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// Prompt to explain, instead of a body
    #[arg(long, requires = "model")]
    prompt: Option<String>,
    /// Model of `--prompt`
    #[arg(long)]
    model: Option<String>,
    /// Show what was decided for a past request, by its `x-request-id`
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
    /// Path of the request
    #[arg(long, default_value = "/v1/chat/completions")]
    path: String,
    /// Header of the request; may be repeated
    #[arg(long = "header", short = 'H', value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Client address of the request [default: a proxy that is trusted to name users]
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<std::net::IpAddr>,
    /// Explain for the user that `quorate user` lists under this name, whatever the headers
    /// contain
    #[arg(long, value_name = "NAME", conflicts_with = "peer")]
    user: Option<String>,
    /// Explain on every member of the cluster at one log index and compare; fails if any differs
    #[arg(long, conflicts_with = "request_id")]
    everywhere: bool,
    /// Wait until everything committed so far is applied
    #[arg(long)]
    linearizable: bool,
    /// Show the prompt's token ids, if the model has a tokenizer
    #[arg(long)]
    token_ids: bool,
    #[command(flatten)]
    target: AdminTarget,
    /// Print the response as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `quorate explain`.
pub(super) async fn run(args: ExplainArgs) -> anyhow::Result<ExitCode> {
    if let Some(id) = &args.request_id {
        return decisions::show(args.target, id, args.json).await;
    }
    let body = match &args.prompt {
        Some(prompt) => body_of(&args.path, args.model.as_deref(), prompt).to_string(),
        None => read_body(args.body.as_deref().or(args.file.as_deref()))?,
    };
    let mut headers = BTreeMap::<String, Vec<String>>::new();
    for (name, value) in args.headers {
        headers.entry(name).or_default().push(value);
    }
    // The body is sent as a string, because block hashes depend on its exact bytes.
    let request = json!({
        "path": args.path,
        "headers": headers,
        "peer": args.peer,
        "user": args.user,
        "body": body,
        "token_ids": args.token_ids,
    });
    let read = if args.linearizable {
        "linearizable"
    } else {
        "local"
    };
    let path = format!("/admin/v1/explain?read={read}");
    if args.everywhere {
        let compared = everywhere::explain(&args.target, &path, &request, args.json);
        let (text, code) = compared.await?;
        terminal::print(text)?;
        return Ok(code);
    }
    let answer = args
        .target
        .send(Method::POST, &path, Some(&request))
        .await?;
    if args.json {
        return print_json(&answer);
    }
    terminal::print(text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

/// Parses a header of the form `name: value`.
fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("expected NAME: VALUE")?;
    Ok((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
}

/// Returns the smallest request body for `path` that contains `prompt`. Its `model` is `null` if
/// there is none.
fn body_of(path: &str, model: Option<&str>, prompt: &str) -> Value {
    match path {
        "/v1/completions" | "/tokenize" => json!({ "model": model, "prompt": prompt }),
        "/v1/responses" | "/v1/embeddings" => json!({ "model": model, "input": prompt }),
        _ => json!({ "model": model, "messages": [{ "role": "user", "content": prompt }] }),
    }
}

fn read_body(path: Option<&std::path::Path>) -> anyhow::Result<String> {
    let Some(path) = path.filter(|path| path.as_os_str() != "-") else {
        let mut body = String::new();
        std::io::stdin()
            .read_to_string(&mut body)
            .context("read stdin")?;
        return Ok(body);
    };
    read_text(path).with_context(|| format!("read {}", path.display()))
}

pub(super) fn prompt_line(answer: &Value) -> String {
    let unit = match &answer["unit"] {
        Value::Object(fallback) => {
            let why = fallback.values().next().map_or_else(String::new, cell);
            format!("characters, because the tokens are not available: {why}")
        }
        unit => cell(unit),
    };
    let is_counted = answer["unit"] == "tokens";
    format!(
        "prompt   {}{} tokens; tokenizer {}, blocks of {unit}",
        if is_counted { "" } else { "about " },
        cell(&answer["tokens"]),
        cell(&answer["tokenizer"]),
    )
}

/// Returns the facts that hold for the whole decision, one per line.
fn facts(answer: &Value) -> Vec<String> {
    let blocks = format!(
        "{} of about {} tokens, {} of them can be cached",
        cell(&answer["blocks_total"]),
        cell(&answer["tokens_per_block"]),
        cell(&answer["blocks_matchable"]),
    );
    let choice = match (&answer["choice"], &answer["no_choice"]) {
        (Value::Null, Value::Null) => "none: the request is refused before it is routed".to_owned(),
        (Value::Null, why) => format!("none: {}", cell(why)),
        (choice, _) => format!("{}, by {}", cell(choice), cell(&answer["reason"])),
    };
    let named_by = match answer["user_source"].as_str() {
        Some("nobody") => "the request names none".to_owned(),
        _ => format!("named by {}", cell(&answer["user_source"])),
    };
    let mut lines = vec![
        format!(
            "model    {}{}",
            cell(&answer["model"]),
            resolved(&answer["resolved"])
        ),
        format!(
            "user     {} ({named_by}), priority {}",
            cell(&answer["user"]),
            cell(&answer["priority"])
        ),
        format!("session  {}", session(answer)),
        prompt_line(answer),
        format!("blocks   {blocks}"),
        format!(
            "policy   {}, named by the {}",
            cell(&answer["policy"]["policy"]),
            cell(&answer["policy_source"])
        ),
        format!("choice   {choice}"),
        format!(
            "index    {} ({})",
            cell(&answer["index"]),
            cell(&answer["read"])
        ),
    ];
    lines.extend(admission(answer));
    match (&answer["prefill"], &answer["whole"]) {
        (Value::Object(prefill), _) => lines.push(format!(
            "prefill  {}, by {}; it holds {} blocks, handed over by {}",
            cell(&prefill["choice"]),
            cell(&prefill["reason"]),
            cell(&prefill["matched"]),
            cell(&prefill["handover"]),
        )),
        (_, Value::String(why)) => lines.push(format!("prefill  by the same: {why}")),
        (_, _) => {}
    }
    if answer["is_panic"] == true {
        lines.push("health   doubted: most probes fail while requests succeed".to_owned());
    }
    if let Value::Array(_) = &answer["token_ids"] {
        lines.push(format!("ids      {}", cell(&answer["token_ids"])));
    }
    lines
}

/// Says why the model is not the one that the request names; empty if it is.
fn resolved(resolved: &Value) -> String {
    let Value::Object(_) = resolved else {
        return String::new();
    };
    let requested = cell(&resolved["requested"]);
    let mut text = match &resolved["split_by"] {
        Value::Null if resolved["requested"] == resolved["meant"] => String::new(),
        Value::Null => format!("; {requested} is an alias of {}", cell(&resolved["meant"])),
        by => format!(
            "; {requested} is split by {}, here to {}",
            cell(by),
            cell(&resolved["meant"])
        ),
    };
    if resolved["is_fallback"] == true {
        text += &format!(
            "; the fallback of {}, which no engine can serve",
            cell(&resolved["meant"])
        );
    }
    text
}

/// Returns the session that the request names, and the one that the policy uses, if any.
fn session(answer: &Value) -> String {
    let (named, of_policy) = (&answer["session"], &answer["request"]["session_source"]);
    let mut text = match named {
        Value::Null => "the request names none".to_owned(),
        named => format!(
            "{} ({}), named by {}",
            cell(&named["name"]),
            cell(&named["id"]),
            cell(&named["source"])
        ),
    };
    if let Value::String(parent) = &named["parent"] {
        text += &format!("; started by {} ({parent})", cell(&named["parent_name"]));
    }
    if named["final"] == true {
        text += "; its last turn";
    }
    if let Value::String(source) = of_policy {
        let key = cell(&answer["request"]["session"]);
        text += &format!("; the policy uses {key}, by {source}");
    }
    for source in answer["session_names_refused"]
        .as_array()
        .into_iter()
        .flatten()
    {
        text += &format!("; {} is out of bounds", cell(source));
    }
    text
}

/// Returns what admission would do with the request, one fact per line.
fn admission(answer: &Value) -> Vec<String> {
    let told = &answer["admission"];
    let fate = match &answer["refusal"] {
        Value::Null if told["would_wait"] == true => format!(
            "waits: place {} in this replica's queue, {}{}",
            cell(&told["place"]),
            match &told["predicted_wait_ms"] {
                Value::Number(ms) if ms.as_u64() > Some(0) => {
                    format!("about {} s", thousandths(&told["predicted_wait_ms"]))
                }
                _ => "for a time that is not known yet".to_owned(),
            },
            match told["waits_for_peers"].as_bool() {
                Some(true) => "; users who wait at other replicas go first",
                Some(false) | None => "",
            }
        ),
        Value::Null => "goes at once".to_owned(),
        refusal => format!(
            "refused with {} {}: {}{}",
            cell(&refusal["status"]),
            cell(&refusal["code"]),
            cell(&refusal["message"]),
            match refusal["retry_after_s"].as_u64() {
                Some(seconds) => format!("; retry after {seconds} s"),
                None => String::new(),
            }
        ),
    };
    let limits = told["limits"].as_array().into_iter().flatten();
    let limits: Vec<String> = limits.map(limit).collect();
    let limits = match limits.is_empty() {
        true => "none".to_owned(),
        false => limits.join("; "),
    };
    let tokens = |name: &str| thousandths(&told[name]);
    let fairness = match &told["least_counter_milli_tokens"] {
        Value::Null => "nobody else waits".to_owned(),
        _ => format!(
            "may be up to {} above the least of those who wait, {}",
            tokens("slack_milli_tokens"),
            tokens("least_counter_milli_tokens"),
        ),
    };
    vec![
        format!("admitted {fate}"),
        format!("limits   {limits}"),
        format!("counter  {}; {fairness}", tokens("counter_milli_tokens")),
    ]
}

/// Describes what is left of a limit or budget.
fn limit(left: &Value) -> String {
    let kind = match left["limit"].as_str() {
        Some("requests") => "requests",
        Some("tokens") => "tokens",
        Some("concurrent") => "requests at once",
        Some("concurrent-per-tree") => "requests at once of the session's tree",
        Some("tokens-per-tree") => "tokens of the session's tree",
        Some("day-budget") => "tokens of the day's budget",
        Some("month-budget") => "tokens of the month's budget",
        Some(_) | None => "",
    };
    let resets = match left["resets_in_ms"].as_u64() {
        Some(ms @ 1..) => {
            let seconds = Duration::from_secs(ms.div_ceil(1000));
            format!(", all again in {}", humantime::format_duration(seconds))
        }
        Some(0) | None => String::new(),
    };
    format!(
        "{} of {} {kind} left{resets}",
        cell(&left["left"]),
        cell(&left["of"])
    )
}

/// Formats an explanation as text.
pub(super) fn text(answer: &Value) -> String {
    let mut table = FittedTable::new(&[
        column("backend"),
        column("verdict"),
        column("matched").number(),
        column("(applied)").number().rank(4),
        column("running").number().rank(1),
        column("(here)").number().rank(4),
        column("waiting").number().rank(3),
        column("prefill").number().rank(2),
        column("engine queue").number().rank(2),
        column("KV use").number().rank(3),
        column("score").number(),
    ]);
    for backend in answer["backends"].as_array().map_or(&[][..], Vec::as_slice) {
        let (here, cluster) = (&backend["here"], &backend["cluster"]);
        table.add_row([
            cell(&backend["id"]),
            cell(&backend["verdict"]),
            cell(&backend["matched"]),
            cell(&backend["matched_applied"]),
            cell(&cluster["running"]),
            cell(&here["running"]),
            cell(&cluster["waiting"]),
            cell(&cluster["pending_prefill_tokens"]),
            cell(&backend["engine_waiting"]),
            percent(&backend["kv_usage_percent"]),
            decisions::score(&answer["policy"], &backend["score"]),
        ]);
    }
    format!("{}\n\n{table}", facts(answer).join("\n"))
}
