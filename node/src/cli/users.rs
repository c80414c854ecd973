//! `quorate user ...`: shows and changes users, their weights and limits.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::Subcommand;
use http::Method;
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::encoded;
use super::edit::{WriteArgs, document, put};
use super::read::{ReadArgs, details, json_text, limits, print_json, thousandths};
use super::settings::{self, DefaultsCommand};
use super::table::cell;
use super::watch::{WatchArgs, watch};

/// Arguments of `quorate user`; without an operation, it lists users, highest usage first.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct UserArgs {
    #[command(subcommand)]
    command: Option<UserCommand>,
    #[command(flatten)]
    list: WatchArgs,
}

/// Operations on users.
#[derive(Debug, Subcommand)]
enum UserCommand {
    /// Show everything known about a user
    Show {
        /// Name of the user
        name: String,
        #[command(flatten)]
        read: ReadArgs,
    },
    /// Change a user's weight, limits, budget, models or cache; omitted ones stay the same
    Set(SetUserArgs),
    /// Show or change the defaults of users
    #[command(subcommand)]
    Defaults(DefaultsCommand),
    /// Delete a user who has no requests in progress
    Delete {
        /// Name of the user
        name: String,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Reset what a user has used of its limits per window and of its budgets
    Forgive {
        /// Name of the user
        name: String,
        #[command(flatten)]
        write: WriteArgs,
    },
}

/// Arguments of `quorate user set`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("bound").multiple(true).args(["requests", "tokens", "concurrent", "concurrent_per_tree", "tokens_per_tree", "window"]))]
#[command(group = clap::ArgGroup::new("budget").multiple(true).args(["budget_day", "budget_month"]))]
struct SetUserArgs {
    /// Name of the user
    name: String,
    /// Share of the fleet relative to other users: 2 gets twice as much as 1
    #[arg(long, value_parser = weight, allow_negative_numbers = true)]
    weight: Option<u32>,
    /// Requests per window
    #[arg(long, value_name = "N")]
    requests: Option<u32>,
    /// Tokens per window, cached ones not counted
    #[arg(long, value_name = "N")]
    tokens: Option<u64>,
    /// Concurrent requests
    #[arg(long, value_name = "N")]
    concurrent: Option<u32>,
    /// Concurrent requests of one tree of sessions: an agent with its sub-agents
    #[arg(long, value_name = "N")]
    concurrent_per_tree: Option<u32>,
    /// Tokens of one tree of sessions, prompts and responses together
    #[arg(long, value_name = "N")]
    tokens_per_tree: Option<u64>,
    /// Length of the window, such as `1m`
    #[arg(long, value_name = "DURATION")]
    window: Option<String>,
    /// Remove the user's own limits, so that the default ones apply
    #[arg(long, conflicts_with = "bound")]
    no_limits: bool,
    /// Tokens per day (UTC), prompts and responses together
    #[arg(long, value_name = "TOKENS")]
    budget_day: Option<u64>,
    /// Tokens per month (UTC), prompts and responses together
    #[arg(long, value_name = "TOKENS")]
    budget_month: Option<u64>,
    /// Remove the user's budget, so that the default applies
    #[arg(long, conflicts_with = "budget")]
    no_budget: bool,
    /// A model that the user may use, or a prefix and `*`; may be repeated. Replaces the current
    /// list
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    /// Let the user use all models
    #[arg(long, conflicts_with = "models")]
    all_models: bool,
    /// Whether the user shares cached blocks with others: `shared`, `isolated`, or `group:NAME` to
    /// share them within a group; `default`: as users without their own setting
    #[arg(long, value_name = "SCOPE")]
    cache: Option<String>,
    /// Read all settings from this file, as `user show --json` prints them; `-` is stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["weight", "bound", "no_limits", "budget", "no_budget", "models", "all_models", "cache"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Parses a weight and returns it in thousandths.
fn weight(text: &str) -> Result<u32, String> {
    let expected = || "expected a number such as 2 or 0.5, with at most three decimals".to_owned();
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if decimals.len() > 3 || whole.is_empty() || !is_number(whole) || !is_number(decimals) {
        return Err(expected());
    }
    format!("{whole}{decimals:0<3}")
        .parse()
        .map_err(|_| expected())
}

/// Runs `quorate user ...`.
pub(super) async fn run(args: UserArgs) -> anyhow::Result<ExitCode> {
    let Some(command) = args.command else {
        return watch(args.list, list).await;
    };
    match command {
        UserCommand::Show { name, read } => {
            let user = read.target.get(&path_of(&name)).await?;
            if read.json {
                return print_json(&user);
            }
            terminal::print(details(&user))?;
            Ok(ExitCode::SUCCESS)
        }
        UserCommand::Set(args) => set(args).await,
        UserCommand::Defaults(command) => settings::user_defaults(command).await,
        UserCommand::Delete { name, write } => {
            let path = path_of(&name);
            let answer = write.target.send(Method::DELETE, &path, None).await?;
            write.done(&format!("user {name}: deleted"), &answer)
        }
        UserCommand::Forgive { name, write } => {
            let path = format!("{}/forgive", path_of(&name));
            let answer = write.target.send(Method::POST, &path, None).await?;
            write.done(
                &format!("user {name}: usage of limits and budgets reset"),
                &answer,
            )
        }
    }
}

fn path_of(name: &str) -> String {
    match name {
        // Unencoded, it is the path of the defaults of users.
        "defaults" => "/admin/v1/users/%64efaults".to_owned(),
        name => format!("/admin/v1/users/{}", encoded(name)),
    }
}

/// Lists users, highest usage first.
async fn list(args: &ReadArgs) -> anyhow::Result<(String, ExitCode)> {
    let mut users = args.target.list("/admin/v1/users", "users").await?;
    users.sort_by_key(|user| std::cmp::Reverse(user["counter_milli_tokens"].as_u64()));
    if args.json {
        return Ok((json_text(&Value::Array(users))?, ExitCode::SUCCESS));
    }
    let mut table = FittedTable::new(&[
        column("user"),
        column("weight").number().rank(2),
        column("counter").number(),
        column("in flight").number(),
        column("waiting").number().rank(1),
        column("limits").rank(2),
        column("requests").number().rank(1),
        column("input").number().rank(3),
        column("cached").number().rank(3),
        column("output").number().rank(3),
        column("input 5m").number().rank(2),
        column("output 5m").number().rank(2),
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
    Ok((table.to_string(), ExitCode::SUCCESS))
}

async fn set(args: SetUserArgs) -> anyhow::Result<ExitCode> {
    let path = path_of(&args.name);
    let target = &args.write.target;
    let answer = match &args.file {
        Some(file) => {
            target
                .send(Method::PUT, &path, Some(&document(file)?))
                .await?
        }
        None => {
            // Reports wrong flags before any request is sent.
            args.changes(Value::Null)?;
            let change = |mut user: Value| args.changes(user["config"].take());
            target.edit(&path, change).await?
        }
    };
    args.write
        .done(&format!("user {}: set", args.name), &answer)
}

impl SetUserArgs {
    /// Returns `settings`, those of the user, as changed by the flags.
    fn changes(&self, settings: Value) -> anyhow::Result<Value> {
        let mut changed = match settings {
            Value::Null => json!({}),
            settings => settings,
        };
        let given = [
            ("weight_milli", json!(self.weight)),
            ("limits.requests", json!(self.requests)),
            ("limits.tokens", json!(self.tokens)),
            ("limits.concurrent", json!(self.concurrent)),
            (
                "limits.concurrent_per_tree",
                json!(self.concurrent_per_tree),
            ),
            ("limits.tokens_per_tree", json!(self.tokens_per_tree)),
            ("limits.window", json!(self.window)),
            ("budget.day", json!(self.budget_day)),
            ("budget.month", json!(self.budget_month)),
            ("cache", json!(self.cache)),
        ];
        let given = given.into_iter().filter(|(_, value)| !value.is_null());
        let models = json!(self.models);
        let models = (!self.models.is_empty()).then_some(("models", models));
        let mut is_any = false;
        for (path, value) in given.chain(models) {
            is_any = true;
            put(&mut changed, path, value);
        }
        let removed = [
            ("limits", self.no_limits),
            ("budget", self.no_budget),
            ("models", self.all_models),
            ("cache", self.cache.as_deref() == Some("default")),
        ];
        for (name, _) in removed.into_iter().filter(|(_, is_removed)| *is_removed) {
            is_any = true;
            changed[name] = Value::Null;
        }
        if !is_any {
            bail!("nothing to set: give a weight, a limit, a budget, models, a cache or a file");
        }
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_decimal_numbers() {
        for (text, milli) in [("2", 2000), ("0.5", 500), ("1.05", 1050), ("0.125", 125)] {
            assert_eq!(weight(text), Ok(milli), "{text}");
        }
        for wrong in ["", ".5", "-1", "1.0001", "1e3", "9999999999"] {
            assert!(weight(wrong).is_err(), "{wrong}");
        }
    }
}
