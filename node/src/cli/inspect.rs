//! `quorate inspect`: the state at a log index, offline, from a data directory or a backup.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};
use state::RouterState;
use state::users::UserView;

use super::explain;
use super::read::{limits, print_json, thousandths};
use super::source::ConfigSource;
use super::table::cell;
use crate::app::offline::{self, OfflineState};
use crate::config::Config;

/// Maximum number of rows in each table of users or backends.
const SHOWN_MAX: usize = 50;
/// Number of users read from the state at a time.
const PAGE: usize = 1000;

/// Arguments of `quorate inspect`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["data_dir", "backup"]))]
pub(super) struct InspectArgs {
    /// Data directory of a stopped replica, or a copy of one; it is only read
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Backup file, instead of a data directory
    #[arg(long, value_name = "FILE")]
    backup: Option<PathBuf>,
    /// Log index to stop at [default: the last one known to be committed]
    #[arg(long, value_name = "INDEX")]
    to: Option<u64>,
    /// Explain the request in this file, a body of `POST /admin/v1/explain`, against the state
    #[arg(long, value_name = "FILE")]
    explain: Option<PathBuf>,
    /// Directory for the copy that is replayed, which is as large as the data directory [default:
    /// the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// For `--explain`: tokenizers, and how users are identified
    #[command(flatten)]
    config: ConfigSource,
}

/// Runs `quorate inspect`.
pub(super) async fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let asked = match &args.explain {
        None => None,
        Some(file) => {
            let body = std::fs::read(file).with_context(|| format!("read {}", file.display()))?;
            Some((explaining(args.config)?, body))
        }
    };
    let (data_dir, backup, to) = (args.data_dir, args.backup, args.to);
    let scratch = args.scratch.unwrap_or_else(std::env::temp_dir);
    let scratch = scratch.join(format!("quorate-inspect-{}", std::process::id()));
    let replayed =
        tokio::task::spawn_blocking(move || open(data_dir.as_deref(), backup, &scratch, to));
    let replayed = replayed.await??;
    let mut answer = replayed.with_state(shown);
    answer["range"] = json!({
        "first": replayed.range.snapshot,
        "committed": replayed.range.committed,
        "last": replayed.range.last,
    });
    if let Some((config, body)) = asked {
        let mut explained = replayed.explained(&config, &body).await?;
        explained["load"] = json!("unknown: engines count as healthy and idle");
        answer["explain"] = explained;
    }
    if args.json {
        return print_json(&answer);
    }
    terminal::print(text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the config for `--explain`. Without a file, it is the default config with a placeholder
/// id.
fn explaining(mut source: ConfigSource) -> anyhow::Result<Config> {
    source.set_placeholder_id();
    Ok(source.load()?.config)
}

fn open(
    data_dir: Option<&Path>,
    backup: Option<PathBuf>,
    scratch: &Path,
    to: Option<u64>,
) -> anyhow::Result<OfflineState> {
    match (data_dir, backup) {
        (_, Some(file)) => offline::backed_up(&file, to),
        (Some(data_dir), None) => offline::replayed(data_dir, scratch, to)
            .with_context(|| format!("replay {}", data_dir.display())),
        (None, None) => unreachable!("the command line requires one of them"),
    }
}

/// Returns the contents of the state as JSON.
fn shown(state: &RouterState) -> Value {
    let view = state.view();
    let registry = view.registry();
    let service = view.service();
    let backend = |backend: &state::Backend| {
        let served = service.get(backend.handle.slot);
        json!({
            "id": backend.spec.id,
            "url": backend.spec.url,
            "models": backend.spec.models,
            "is_draining": backend.draining,
            "moves_streams": backend.moves_streams,
            "capacity_blocks": backend.capacity_blocks(),
            "owned_blocks": state.owned_blocks(backend.handle.slot),
            "limit": served.and_then(|served| served.limit),
            "slot": backend.handle.slot,
            "incarnation": backend.handle.incarnation,
        })
    };
    let mut users: Vec<UserView> = Vec::new();
    loop {
        let page = state.users(users.last().map(|user| user.key), PAGE);
        let is_last = page.len() < PAGE;
        users.extend(page);
        if is_last {
            break;
        }
    }
    users.sort_by_key(|user| std::cmp::Reverse(user.counter_milli_tokens));
    let user = |user: &UserView| {
        json!({
            "name": &*user.name,
            "key": format!("{:016x}", user.key.0),
            "weight_milli": user.weight_milli,
            "counter_milli_tokens": user.counter_milli_tokens,
            "in_flight": user.in_flight,
            "waiting": user.waiting,
            "config": user.own,
            "left": user.left,
            "total": user.total,
        })
    };
    json!({
        "index": state.applied(),
        "digest": format!("{:032x}", state.digest()),
        "now_ms": state.now_ms(),
        "policy": registry.policy,
        "admission": registry.admission,
        "open_leases": state.open_leases(),
        "owned_blocks": state.owned_blocks_all(),
        "backends": registry.backends.iter().map(backend).collect::<Vec<_>>(),
        "users": users.iter().map(user).collect::<Vec<_>>(),
    })
}

fn text(answer: &Value) -> String {
    let range = &answer["range"];
    let index = answer["index"].as_u64();
    let unsure = match index > range["committed"].as_u64() {
        true => "\nwarning  entries behind the committed index may never have been committed",
        false => "",
    };
    let mut out = format!(
        "index    {}; this store has {} to {}, committed for certain up to {}{unsure}\n\
         digest   {} (GET /admin/v1/digest?index={})\n\
         policy   {}\n\
         blocks   {} owned, {} open leases\n",
        cell(&answer["index"]),
        cell(&range["first"]),
        cell(&range["last"]),
        cell(&range["committed"]),
        cell(&answer["digest"]),
        cell(&answer["index"]),
        cell(&answer["policy"]["policy"]),
        cell(&answer["owned_blocks"]),
        cell(&answer["open_leases"]),
    );
    let all = |field: &str| answer[field].as_array().cloned().unwrap_or_default();
    let (known, users) = (all("backends"), all("users"));
    let (backends, charged) = (backends_table(&known), users_table(&users));
    out.push_str(&format!("\n{backends}\n\n{charged}\n"));
    let hidden = known.len().max(users.len()).saturating_sub(SHOWN_MAX);
    if hidden > 0 {
        out.push_str(&format!(
            "{} backends and {} users in all; --json has every one\n",
            known.len(),
            users.len()
        ));
    }
    if let explained @ Value::Object(_) = &answer["explain"] {
        let load = cell(&explained["load"]);
        out.push_str(&format!(
            "\n{}\nload     {load}\n",
            explain::text(explained)
        ));
    }
    out.trim_end().to_owned()
}

fn backends_table(backends: &[Value]) -> FittedTable {
    let mut shown = FittedTable::new(&[
        column("backend"),
        column("url").rank(1),
        column("models").rank(3),
        column("draining"),
        column("limit").number().rank(2),
        column("owned").number(),
        column("capacity").number().rank(1),
    ]);
    for backend in backends.iter().take(SHOWN_MAX) {
        shown.add_row([
            cell(&backend["id"]),
            cell(&backend["url"]),
            cell(&backend["models"]),
            cell(&backend["is_draining"]),
            cell(&backend["limit"]),
            cell(&backend["owned_blocks"]),
            cell(&backend["capacity_blocks"]),
        ]);
    }
    shown
}

fn users_table(users: &[Value]) -> FittedTable {
    let mut shown = FittedTable::new(&[
        column("user"),
        column("weight").number().rank(2),
        column("counter").number(),
        column("in flight").number(),
        column("waiting").number().rank(1),
        column("limits").rank(1),
        column("requests").number().rank(1),
        column("output").number().rank(3),
    ]);
    for user in users.iter().take(SHOWN_MAX) {
        let name = match user["name"].as_str() {
            Some("") | None => &user["key"],
            Some(_) => &user["name"],
        };
        shown.add_row([
            cell(name),
            thousandths(&user["weight_milli"]),
            thousandths(&user["counter_milli_tokens"]),
            cell(&user["in_flight"]),
            cell(&user["waiting"]),
            limits(user),
            cell(&user["total"]["requests"]),
            cell(&user["total"]["output"]),
        ]);
    }
    shown
}
