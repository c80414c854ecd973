//! `quorate config reload`: makes replicas reload their own configs, like a remote SIGHUP, and
//! prints the results.

use std::process::ExitCode;

use http::{Method, StatusCode};
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::read::print_json;
use super::table::cell;
use crate::json_client::{AnswerError, JsonAnswer};

const PATH: &str = "/admin/v1/config/reload";

/// Arguments of `quorate config reload`.
#[derive(Debug, clap::Args)]
pub(super) struct ReloadArgs {
    #[command(flatten)]
    target: AdminTarget,
    /// Print the results as JSON, an entry for each replica
    #[arg(long)]
    json: bool,
}

/// Outcome of one replica's reload.
enum Reloaded {
    /// The config was read. The report lists the changes that took effect.
    Read(Value),
    /// The config has faults, and nothing was changed.
    Faulty(Value),
    /// The call failed or its outcome is unknown.
    Failed(anyhow::Error),
}

impl Reloaded {
    fn of(answered: anyhow::Result<JsonAnswer>) -> Self {
        let answer = match answered {
            Ok(answer) => answer,
            Err(error) => return Self::Failed(error),
        };
        match answer.success() {
            Ok(report) => Self::Read(report),
            Err(error) => match error.downcast::<AnswerError>() {
                Ok(AnswerError { status, problem })
                    if status == StatusCode::UNPROCESSABLE_ENTITY =>
                {
                    Self::Faulty(problem)
                }
                Ok(error) => Self::Failed(error.into()),
                Err(error) => Self::Failed(error),
            },
        }
    }

    fn json(&self, replica: &str) -> Value {
        match self {
            Self::Read(report) => json!({ "admin": replica, "report": report }),
            Self::Faulty(problem) => json!({ "admin": replica, "faults": problem["faults"] }),
            Self::Failed(error) => json!({ "admin": replica, "error": format!("{error:#}") }),
        }
    }

    /// Prints the outcome as text.
    fn print(&self, replica: &str) -> anyhow::Result<()> {
        match self {
            Self::Read(report) => terminal::print(told(replica, report)),
            Self::Faulty(problem) => {
                let title = format!("{replica}: the config has faults; nothing was changed");
                let faults = problem["faults"].as_array().into_iter().flatten();
                let faults = faults.map(|fault| {
                    let [place, message, expected] =
                        ["place", "message", "expected"].map(|name| cell(&fault[name]));
                    format!("\n  {place}: {message} (expected {expected})")
                });
                terminal::print(title + &faults.collect::<String>())
            }
            Self::Failed(error) => terminal::print(format_args!("{replica}: {error:#}")),
        }
    }

    /// Returns the exit code: 0 if all changes are in effect now or after a restart, 2 for a faulty
    /// config, else 1.
    fn code(&self) -> u8 {
        match self {
            Self::Read(report) => u8::from(!keys(report, "faults").is_empty()),
            Self::Faulty(_) => 2,
            Self::Failed(_) => 1,
        }
    }
}

/// Runs `quorate config reload` at every replica that `--admin` names.
pub(super) async fn reload(args: ReloadArgs) -> anyhow::Result<ExitCode> {
    let (mut code, mut all) = (0, Vec::new());
    for target in args.target.each() {
        let replica = target.url("");
        let reloaded = Reloaded::of(target.ask(Method::POST, PATH, None).await);
        code = code.max(reloaded.code());
        match args.json {
            true => all.push(reloaded.json(&replica)),
            false => reloaded.print(&replica)?,
        }
    }
    if args.json {
        print_json(&Value::Array(all))?;
    }
    Ok(ExitCode::from(code))
}

fn keys<'a>(report: &'a Value, list: &str) -> &'a [Value] {
    report[list].as_array().map_or(&[], Vec::as_slice)
}

/// Formats the report of a reload as text.
fn told(replica: &str, report: &Value) -> String {
    let columns = [
        column("key"),
        column("before").prose(),
        column("after").prose(),
        column("counts"),
    ];
    let mut table = FittedTable::new(&columns);
    let lists = [
        ("taken", "now"),
        ("need_restart", "after a restart"),
        ("cluster_keeps", "not: the cluster's value does"),
    ];
    let mut changed = 0;
    for (list, counts) in lists {
        for it in keys(report, list) {
            changed += 1;
            let [key, before, after] = ["key", "before", "after"].map(|name| cell(&it[name]));
            table.add_row([key, before, after, counts.to_owned()]);
        }
    }
    let mut lines = match changed {
        0 => vec![format!("{replica}: reloaded; the config has not changed")],
        _ => vec![format!("{replica}: reloaded"), table.to_string()],
    };
    let named = |list| {
        let keys = keys(report, list).iter().map(|it| cell(&it["key"]));
        keys.collect::<Vec<_>>().join(", ")
    };
    if !keys(report, "need_restart").is_empty() {
        lines.push(format!(
            "restart this replica for: {}",
            named("need_restart")
        ));
    }
    if !keys(report, "cluster_keeps").is_empty() {
        let keys = named("cluster_keeps");
        lines.push(format!(
            "`quorate config apply` writes to the cluster: {keys}"
        ));
    }
    for fault in keys(report, "faults") {
        lines.push(format!("kept unchanged: {}", cell(fault)));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let key = |key| json!({ "key": key, "before": 1, "after": 2 });
        let report = json!({
            "taken": [key("log.level")],
            "need_restart": [key("limits.max_connections"), key("listen.data")],
            "cluster_keeps": [key("admission.max_queue")],
            "faults": ["tls.data.cert_file: expired"],
        });
        let shown = told("http://a:1", &report);
        for line in [
            "restart this replica for: limits.max_connections, listen.data",
            "`quorate config apply` writes to the cluster: admission.max_queue",
            "kept unchanged: tls.data.cert_file: expired",
        ] {
            assert!(shown.lines().any(|it| it == line), "{line} in {shown}");
        }
        assert_eq!(Reloaded::Read(report).code(), 1);
        let nothing = json!({ "taken": [], "need_restart": [], "cluster_keeps": [], "faults": [] });
        let shown = told("http://a:1", &nothing);
        assert_eq!(shown, "http://a:1: reloaded; the config has not changed");
        assert_eq!(Reloaded::Read(nothing).code(), 0);
    }
}
