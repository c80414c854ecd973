//! `quorate backend ...`: shows and changes the registry of engines.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use http::{Method, StatusCode};
use lab::terminal::{self, FittedTable, column};
use serde_json::{Map, Value, json};
use state::command::BackendRole;
use tokio::time::{Instant, sleep};

use super::client::{AdminTarget, encoded};
use super::edit::{WriteArgs, document};
use super::read::{ReadArgs, details, json_text, print_json};
use super::table::{cell, millis, percent};
use super::watch::{WatchArgs, watch};

/// Polling interval for a draining backend.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Names of a backend's writable fields.
const FIELDS: [&str; 7] = [
    "url",
    "models",
    "labels",
    "capacity_blocks",
    "kv_events",
    "kv_replay",
    "role",
];

/// Arguments of `quorate backend`; without an operation, it lists backends.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct BackendArgs {
    #[command(subcommand)]
    command: Option<BackendCommand>,
    #[command(flatten)]
    list: WatchArgs,
}

/// Operations on backends.
#[derive(Debug, Subcommand)]
enum BackendCommand {
    /// Show everything known about a backend
    Show {
        /// Id of the backend
        id: String,
        #[command(flatten)]
        read: ReadArgs,
    },
    /// Register a backend
    Add(AddBackendArgs),
    /// Change the given fields of a backend, and keep the others
    Set(SetBackendArgs),
    /// Stop sending new requests to a backend
    Drain {
        /// Id of the backend
        id: String,
        /// Wait until it has no requests; fail after this time
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
        wait: Option<Duration>,
        /// Let other backends go on with its streams, as far as they can
        #[arg(long)]
        move_streams: bool,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Send requests to a drained backend again
    Undrain {
        /// Id of the backend
        id: String,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Remove a backend, and everything known about its cache
    Remove {
        /// Id of the backend
        id: String,
        #[command(flatten)]
        write: WriteArgs,
    },
}

/// Arguments of `quorate backend add`.
#[derive(Debug, clap::Args)]
struct AddBackendArgs {
    /// Id of the backend, which must be new
    id: String,
    /// Base URL of the engine
    url: String,
    #[command(flatten)]
    fields: BackendFields,
    #[command(flatten)]
    write: WriteArgs,
}

/// Arguments of `quorate backend set`.
#[derive(Debug, clap::Args)]
struct SetBackendArgs {
    /// Id of the backend
    id: String,
    /// Base URL of the engine; a new URL means a new engine, with an empty cache
    #[arg(long)]
    url: Option<String>,
    #[command(flatten)]
    fields: BackendFields,
    /// Reset a field to its default; may be repeated
    #[arg(long, value_name = "FIELD", value_parser = FIELDS[1..].to_vec())]
    unset: Vec<String>,
    /// Read all fields from this file, as `backend show --json` prints them; `-` is stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "unset", "models", "labels", "capacity_blocks", "kv_events", "kv_replay", "role"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Fields of a backend besides its URL.
#[derive(Debug, clap::Args)]
struct BackendFields {
    /// Model that it serves; may be repeated [default: those that the engine lists]
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,
    /// Label; may be repeated
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Blocks that its cache holds [default: as reported by the engine]
    #[arg(long, value_name = "N")]
    capacity_blocks: Option<u32>,
    /// Endpoint of its KV events, or `auto` [default: none, ownership is tracked by leases]
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<String>,
    /// Endpoint that replays KV events [default: none, or with `auto` as reported by the engine]
    #[arg(long, value_name = "ENDPOINT")]
    kv_replay: Option<String>,
    /// Stage of requests that it computes [default: both]
    #[arg(long, value_name = "ROLE", value_parser = BackendRole::ALL.map(BackendRole::label))]
    role: Option<String>,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

impl BackendFields {
    /// Sets the fields of `backend` that the flags give.
    fn lay_over(&self, backend: &mut Value) {
        if !self.models.is_empty() {
            backend["models"] = json!(self.models);
        }
        for (name, value) in &self.labels {
            backend["labels"][name.as_str()] = json!(value);
        }
        if let Some(blocks) = self.capacity_blocks {
            backend["capacity_blocks"] = json!(blocks);
        }
        let texts = [
            ("kv_events", &self.kv_events),
            ("kv_replay", &self.kv_replay),
            ("role", &self.role),
        ];
        for (name, text) in texts {
            if let Some(text) = text {
                backend[name] = json!(text);
            }
        }
    }
}

/// Runs `quorate backend ...`.
pub(super) async fn run(args: BackendArgs) -> anyhow::Result<ExitCode> {
    let Some(command) = args.command else {
        return watch(args.list, list).await;
    };
    let (id, done, method, action, write, wait) = match command {
        BackendCommand::Show { id, read } => return show(&id, read).await,
        BackendCommand::Add(args) => return add(args).await,
        BackendCommand::Set(args) => return set(args).await,
        BackendCommand::Drain {
            id,
            wait,
            move_streams,
            write,
        } => {
            let (done, action) = match move_streams {
                true => (
                    "gets no new requests, and others go on with its streams",
                    "/drain?move_streams=true",
                ),
                false => ("gets no new requests", "/drain"),
            };
            (id, done, Method::POST, action, write, wait)
        }
        BackendCommand::Undrain { id, write } => (
            id,
            "gets requests again",
            Method::POST,
            "/undrain",
            write,
            None,
        ),
        BackendCommand::Remove { id, write } => (id, "removed", Method::DELETE, "", write, None),
    };
    let path = format!("{}{action}", path_of(&id));
    let answer = write.target.send(method, &path, None).await?;
    if let Some(wait) = wait {
        idle(&write.target, &id, wait).await?;
    }
    write.done(&format!("backend {id}: {done}"), &answer)
}

fn path_of(id: &str) -> String {
    format!("/admin/v1/backends/{}", encoded(id))
}

/// Lists backends.
async fn list(args: &ReadArgs) -> anyhow::Result<(String, ExitCode)> {
    let backends = args.target.list("/admin/v1/backends", "backends").await?;
    let text = match args.json {
        true => json_text(&Value::Array(backends))?,
        false => listed(&backends).to_string(),
    };
    Ok((text, ExitCode::SUCCESS))
}

/// Returns a table of `backends`.
pub(super) fn listed(backends: &[Value]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("backend"),
        column("state"),
        column("role").rank(5),
        column("url").rank(3),
        column("models").rank(4),
        column("engine").rank(5),
        column("context").number().rank(6),
        column("block").number().rank(6),
        column("adapters").rank(6),
        column("reports cached").rank(6),
        column("in flight").number(),
        column("(here)").number().rank(6),
        column("limit").number().rank(5),
        column("queued").number().rank(2),
        column("KV use").number().rank(2),
        column("owned").number().rank(4),
        column("capacity").number().rank(5),
        column("prefill/token").number().rank(6),
        column("off").number().rank(6),
        column("detail").prose().rank(1),
    ]);
    for backend in backends {
        let served = match &backend["facts"]["models"] {
            Value::Null => &backend["models"],
            asked => asked,
        };
        table.add_row([
            cell(&backend["id"]),
            cell(&backend["state"]["name"]),
            cell(&backend["role"]),
            cell(&backend["url"]),
            cell(served),
            engine(&backend["engine_info"]),
            cell(&context(&backend["engine_info"])),
            cell(&backend["engine"]["block_size"]),
            cell(&adapters(&backend["engine_info"])),
            cell(&backend["engine_info"]["tells_cached_tokens"]),
            cell(&backend["in_flight"]["cluster"]),
            cell(&backend["in_flight"]["here"]),
            cell(&backend["service"]["limit"]),
            cell(&backend["engine"]["waiting"]),
            percent(&backend["engine"]["kv_usage_percent"]),
            cell(&backend["owned_blocks"]),
            cell(&backend["capacity"]["blocks"]),
            millis(&backend["service"]["learnt"]["prefill_ms_per_token"]),
            percent(&backend["service"]["accuracy"]["error_percent"]),
            match &backend["circuit"]["is_open"] {
                Value::Bool(true) => "its circuit is open".to_owned(),
                _ => cell(&backend["state"]["detail"]),
            },
        ]);
    }
    table
}

/// Returns the kind and version of an engine.
fn engine(info: &Value) -> String {
    let parts = [&info["kind"], &info["version"]];
    let known: Vec<String> = parts
        .iter()
        .filter(|it| !it.is_null())
        .map(|it| cell(it))
        .collect();
    match known.is_empty() {
        true => "-".to_owned(),
        false => known.join(" "),
    }
}

fn models_of(info: &Value) -> impl Iterator<Item = &Value> {
    info["models"].as_array().into_iter().flatten()
}

/// Returns the context length in tokens; if the models differ, the shortest one.
fn context(info: &Value) -> Value {
    let lengths = models_of(info).filter_map(|model| model["max_model_len"].as_u64());
    json!(lengths.min())
}

/// Returns the engine's adapters, each with its base model.
fn adapters(info: &Value) -> Value {
    let adapts = |model: &&Value| !model["parent"].is_null() && model["parent"] != model["id"];
    let shown = models_of(info).filter(adapts).map(|model| {
        let (id, parent) = (cell(&model["id"]), cell(&model["parent"]));
        format!("{id} of {parent}")
    });
    json!(shown.collect::<Vec<_>>())
}

async fn show(id: &str, read: ReadArgs) -> anyhow::Result<ExitCode> {
    let backend = read.target.get(&path_of(id)).await?;
    if read.json {
        return print_json(&backend);
    }
    terminal::print(details(&backend))?;
    Ok(ExitCode::SUCCESS)
}

async fn add(args: AddBackendArgs) -> anyhow::Result<ExitCode> {
    let (target, path) = (&args.write.target, path_of(&args.id));
    let latest = format!("{path}?read=linearizable");
    if target.ask(Method::GET, &latest, None).await?.status == StatusCode::OK {
        let id = &args.id;
        bail!("backend {id} already exists: `quorate backend set {id}` changes it");
    }
    let mut backend = json!({ "url": args.url });
    args.fields.lay_over(&mut backend);
    let answer = target.send(Method::PUT, &path, Some(&backend)).await?;
    args.write
        .done(&format!("backend {}: registered", args.id), &answer)
}

async fn set(args: SetBackendArgs) -> anyhow::Result<ExitCode> {
    let (target, path) = (&args.write.target, path_of(&args.id));
    let change = |present: Value| {
        if present.is_null() {
            bail!("no backend has the id {:?}", args.id);
        }
        let mut backend = written(&present);
        if let Some(url) = &args.url {
            backend["url"] = json!(url);
        }
        for field in &args.unset {
            backend[field] = Value::Null;
        }
        args.fields.lay_over(&mut backend);
        // A null field has its default.
        let given = |(_, value): &(&String, &Value)| !value.is_null();
        let fields = backend.as_object().into_iter().flatten().filter(given);
        let fields = fields.map(|(name, value)| (name.clone(), value.clone()));
        Ok(fields.collect::<Map<_, _>>().into())
    };
    let answer = match &args.file {
        Some(file) => {
            target
                .send(Method::PUT, &path, Some(&document(file)?))
                .await?
        }
        None => target.edit(&path, change).await?,
    };
    args.write
        .done(&format!("backend {}: changed", args.id), &answer)
}

/// Returns the writable fields of a backend.
fn written(shown: &Value) -> Value {
    let mut fields: BTreeMap<&str, Value> = FIELDS
        .iter()
        .map(|name| (*name, shown[name].clone()))
        .collect();
    let capacity = shown["capacity"]["configured_blocks"].clone();
    fields.insert("capacity_blocks", capacity);
    json!(fields)
}

/// Waits until a backend has no requests.
async fn idle(target: &AdminTarget, id: &str, wait: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + wait;
    loop {
        let backend = target.get(&path_of(id)).await?;
        let running = &backend["in_flight"]["cluster"];
        if *running == 0 && backend["state"]["is_draining"] == true {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let waited = humantime::format_duration(wait);
            bail!("backend {id} drains, but has {running} requests after {waited}");
        }
        sleep(LOOK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_details_are_shown() {
        let info = json!({
            "kind": "vllm",
            "version": "0.32.0",
            "tells_cached_tokens": true,
            "models": [
                { "id": "base", "parent": null, "max_model_len": 8192 },
                { "id": "sql", "parent": "base", "max_model_len": 4096 },
            ],
        });
        let backend = json!({ "id": "a", "engine_info": info, "engine": { "block_size": 32 } });
        let text = listed(&[backend]).to_string();
        for word in ["vllm 0.32.0", "4096", "32", "sql of base", "yes"] {
            assert!(text.contains(word), "{word} in\n{text}");
        }
        assert_eq!(engine(&Value::Null), "-");
        assert_eq!(context(&Value::Null), Value::Null);
    }
}
