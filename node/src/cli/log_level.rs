//! `quorate log-level`: shows or sets the log level of running replicas.

use std::process::ExitCode;

use http::Method;
use lab::terminal;
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::read::print_json;
use super::table::cell;

const PATH: &str = "/admin/v1/log";

/// Arguments of `quorate log-level`.
#[derive(Debug, clap::Args)]
pub(super) struct LogLevelArgs {
    /// Level to set until the replicas restart, or a filter such as `info,raft=debug` [default:
    /// show the present one]
    level: Option<String>,
    #[command(flatten)]
    target: AdminTarget,
    /// Print JSON, an entry for each replica
    #[arg(long)]
    json: bool,
}

/// Runs `quorate log-level` at every replica that `--admin` names.
pub(super) async fn run(args: LogLevelArgs) -> anyhow::Result<ExitCode> {
    let (mut all, mut code) = (Vec::new(), ExitCode::SUCCESS);
    let body = args.level.map(|level| json!({ "level": level }));
    let method = body.as_ref().map_or(Method::GET, |_| Method::PUT);
    for target in args.target.each() {
        let admin = target.url("");
        let answer = target.ask(method.clone(), PATH, body.as_ref()).await;
        let (entry, line) = match answer.and_then(|answer| answer.success()) {
            Ok(answer) => {
                let level = &answer["level"];
                let line = format!("{admin}: logs {}", cell(level));
                (json!({ "admin": admin, "level": level }), line)
            }
            Err(error) => {
                code = ExitCode::FAILURE;
                let error = format!("{error:#}");
                let line = format!("{admin}: {}", cell(&json!(error)));
                (json!({ "admin": admin, "error": error }), line)
            }
        };
        match args.json {
            true => all.push(entry),
            false => terminal::print(line)?,
        }
    }
    if args.json {
        print_json(&Value::Array(all))?;
    }
    Ok(code)
}
