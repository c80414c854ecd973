//! `quorate session ...`: shows and ends sessions of agents and chats.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use http::Method;
use lab::terminal::{self, FittedTable, column};
use serde_json::Value;

use super::client::{AdminTarget, encoded};
use super::edit::WriteArgs;
use super::read::{ReadArgs, json_text, print_json};
use super::table::{cell, percent};
use super::watch::{WatchArgs, watch};

/// Arguments of `quorate session`; without an operation, it lists sessions.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct SessionArgs {
    #[command(subcommand)]
    command: Option<SessionCommand>,
    #[command(flatten)]
    list: ListSessionsArgs,
}

/// Operations on sessions.
#[derive(Debug, Subcommand)]
enum SessionCommand {
    /// List sessions, those used last first
    List(ListSessionsArgs),
    /// Show a tree: its figures and its sessions
    Show {
        /// Id of the tree's root, or of any session of it that is no root
        id: String,
        #[command(flatten)]
        read: ReadArgs,
    },
    /// End all sessions of a tree; its requests go on
    End {
        /// Id of the tree's root, or of any session of it that is no root
        id: String,
        #[command(flatten)]
        write: WriteArgs,
    },
}

/// Arguments of `quorate session list`.
#[derive(Debug, clap::Args)]
struct ListSessionsArgs {
    /// Only sessions of this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Only sessions whose last turn was at this backend
    #[arg(long, value_name = "ID")]
    backend: Option<String>,
    /// Maximum number of sessions
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    #[command(flatten)]
    watch: WatchArgs,
}

/// Runs `quorate session ...`.
pub(super) async fn run(args: SessionArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        None => list(args.list).await,
        Some(SessionCommand::List(args)) => list(args).await,
        Some(SessionCommand::Show { id, read }) => {
            let (_, tree) = tree(&read.target, &id).await?;
            if read.json {
                return print_json(&tree);
            }
            terminal::print(shown(&tree))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(SessionCommand::End { id, write }) => {
            let (path, tree) = tree(&write.target, &id).await?;
            let answer = write.target.send(Method::DELETE, &path, None).await?;
            write.done(&format!("tree {}: ended", cell(&tree["root"])), &answer)
        }
    }
}

/// Fetches the tree with the root `id`, or else that of the session `id`, and its path.
async fn tree(target: &AdminTarget, id: &str) -> anyhow::Result<(String, Value)> {
    let of_root = |root: &str| format!("/admin/v1/session-trees/{}", encoded(root));
    let path = of_root(id);
    if let Some(tree) = target.find(&path).await? {
        return Ok((path, tree));
    }
    let session = format!("/admin/v1/sessions/{}", encoded(id));
    let session = target.get(&session).await?;
    let path = of_root(session["root"].as_str().unwrap_or_default());
    let tree = target.get(&path).await?;
    Ok((path, tree))
}

async fn list(args: ListSessionsArgs) -> anyhow::Result<ExitCode> {
    let mut path = format!("/admin/v1/sessions?limit={}", args.limit);
    for (name, value) in [("user", &args.user), ("backend", &args.backend)] {
        if let Some(value) = value {
            path += &format!("&{name}={}", encoded(value));
        }
    }
    let show = async |read: &ReadArgs| {
        let mut page = read.target.get(&path).await?;
        if read.json {
            return Ok((json_text(&page["sessions"].take())?, ExitCode::SUCCESS));
        }
        Ok((listed(&page), ExitCode::SUCCESS))
    };
    watch(args.watch, show).await
}

/// Formats a page of sessions, and how many there are.
fn listed(page: &Value) -> String {
    let sessions = page["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    let mut table = FittedTable::new(&[
        column("session"),
        column("tree").rank(1),
        column("user"),
        column("model").rank(2),
        column("home"),
        column("turns").number(),
        column("context").number().rank(1),
        column("hits").number(),
        column("output").number().rank(3),
        column("age").number().rank(3),
        column("idle").number(),
    ]);
    for session in sessions {
        let user = match session["user"].as_str() {
            Some(name) if !name.is_empty() => cell(&session["user"]),
            _ => cell(&session["user_key"]),
        };
        let names = [cell(&session["id"]), cell(&session["root"]), user];
        table.add_row(names.into_iter().chain(figures(session)));
    }
    format!(
        "{table}\n{} of {} sessions in {} trees",
        sessions.len(),
        cell(&page["sessions_total"]),
        cell(&page["trees_total"])
    )
}

/// Returns the cells of a session that both tables show, from its model on.
fn figures(session: &Value) -> [String; 8] {
    [
        cell(&session["model"]),
        cell(&session["home"]),
        cell(&session["turns"]),
        cell(&session["tokens"]),
        percent(&session["usage"]["hit_percent"]),
        cell(&session["usage"]["output"]),
        time(&session["age_ms"]),
        time(&session["idle_ms"]),
    ]
}

/// Formats a tree: its figures, and its sessions below their parents.
fn shown(tree: &Value) -> String {
    let usage = &tree["usage"];
    let mut table = FittedTable::new(&[
        column("session"),
        column("model").rank(2),
        column("home"),
        column("turns").number(),
        column("context").number(),
        column("hits").number(),
        column("output").number().rank(1),
        column("age").number().rank(3),
        column("idle").number(),
    ]);
    let sessions = tree["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    let mut depths = BTreeMap::new();
    for session in sessions {
        let depth = session["parent"].as_str().and_then(|it| depths.get(it));
        let depth = depth.map_or(0, |depth| depth + 1);
        depths.insert(session["id"].as_str().unwrap_or_default(), depth);
        let name = format!("{}{}", "  ".repeat(depth), cell(&session["id"]));
        table.add_row(std::iter::once(name).chain(figures(session)));
    }
    let user = match &tree["user"] {
        Value::Null => cell(&tree["user_key"]),
        user => cell(user),
    };
    format!(
        "tree     {} of {user}, {} old\nturns    {}\ntokens   {} computed, {} cached ({} hits), {} output\nsessions {} of {}\n\n{table}",
        cell(&tree["root"]),
        time(&tree["age_ms"]),
        cell(&tree["turns"]),
        cell(&usage["input_uncached"]),
        cell(&usage["input_cached"]),
        percent(&usage["hit_percent"]),
        cell(&usage["output"]),
        sessions.len(),
        cell(&tree["sessions_total"]),
    )
}

/// Formats a number of milliseconds in whole seconds; other values as [`cell`] does.
fn time(ms: &Value) -> String {
    match ms.as_u64() {
        Some(ms) => humantime::format_duration(Duration::from_secs(ms / 1000)).to_string(),
        None => cell(ms),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;

    fn session(id: &str, parent: Option<&str>) -> Value {
        json!({
            "id": id, "parent": parent, "root": "a", "user": "ada", "user_key": "0f", "model": "m",
            "home": "gpu-1", "age_ms": 61_500, "idle_ms": 900, "turns": 3, "tokens": 4200,
            "usage": {"input_uncached": 5, "input_cached": 15, "output": 7, "hit_percent": 75.0},
        })
    }

    fn spaceless(text: &str) -> String {
        let lines = text.lines().map(str::trim_end);
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_tree_is_shown_with_children_below_their_parents() {
        let tree = json!({
            "root": "a", "user": null, "user_key": "0f", "age_ms": 61_500, "turns": 9,
            "usage": {"input_uncached": 5, "input_cached": 15, "output": 7, "hit_percent": 75.0},
            "sessions_total": 4,
            "sessions": [
                session("a", None), session("b", Some("a")), session("c", Some("b")),
                session("d", Some("gone")),
            ],
        });
        expect![[r#"
            tree     a of 0f, 1m 1s old
            turns    9
            tokens   5 computed, 15 cached (75.0 % hits), 7 output
            sessions 4 of 4

            session  model  home   turns  context    hits  output    age  idle
            a        m      gpu-1      3     4200  75.0 %       7  1m 1s    0s
              b      m      gpu-1      3     4200  75.0 %       7  1m 1s    0s
                c    m      gpu-1      3     4200  75.0 %       7  1m 1s    0s
            d        m      gpu-1      3     4200  75.0 %       7  1m 1s    0s"#]]
        .assert_eq(&spaceless(&shown(&tree)));
    }

    #[test]
    fn a_list_says_how_many_sessions_there_are() {
        let page = json!({
            "sessions": [session("a", None)], "sessions_total": 40, "trees_total": 12,
        });
        expect![[r#"
            session  tree  user  model  home   turns  context    hits  output    age  idle
            a        a     ada   m      gpu-1      3     4200  75.0 %       7  1m 1s    0s
            1 of 40 sessions in 12 trees"#]]
        .assert_eq(&spaceless(&listed(&page)));
    }
}
