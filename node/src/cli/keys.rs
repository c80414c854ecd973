//! `quorate key ...`: shows and changes the cluster's API keys.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::bail;
use clap::Subcommand;
use http::Method;
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::client::encoded;
use super::edit::WriteArgs;
use super::read::{ReadArgs, print_json};
use super::table::cell;
use super::token::SecretFile;
use crate::json_client::AnswerError;

/// Arguments of `quorate key`; without an operation, it lists keys, without their secrets.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct KeyArgs {
    #[command(subcommand)]
    command: Option<KeyCommand>,
    /// Only keys of this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    #[command(flatten)]
    read: ReadArgs,
}

/// Operations on API keys.
#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Create a key and print its secret, which is not stored anywhere
    Create(CreateKeyArgs),
    /// Revoke a key, so that all replicas refuse it
    Revoke {
        /// Id of the key
        id: String,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Give a key a new secret, and print it
    Rotate {
        /// Id of the key
        id: String,
        /// How long the old secret stays valid, such as `1h` [default: not at all]
        #[arg(long, value_name = "DURATION")]
        grace: Option<String>,
        #[command(flatten)]
        told: SecretArgs,
    },
}

/// Arguments of `quorate key create`.
#[derive(Debug, clap::Args)]
struct CreateKeyArgs {
    /// User that the key belongs to
    user: String,
    /// Name of the key [default: the user's name]
    #[arg(long)]
    name: Option<String>,
    /// When the key expires, such as `2027-01-31T12:00:00Z`
    #[arg(long, value_name = "DATE", conflicts_with = "expires_in")]
    expires_at: Option<String>,
    /// How long until the key expires, such as `30d`
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    expires_in: Option<Duration>,
    /// A model that it may use, or a prefix and `*`; may be repeated [default: all]
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    /// A path that it may use, or a prefix and `*`; may be repeated [default: all]
    #[arg(long = "scope", value_name = "PATH")]
    scopes: Vec<String>,
    #[command(flatten)]
    told: SecretArgs,
}

/// Arguments of commands that create a secret.
#[derive(Debug, clap::Args)]
struct SecretArgs {
    /// Write the secret to this new file instead of printing it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Runs `quorate key ...`.
pub(super) async fn run(args: KeyArgs) -> anyhow::Result<ExitCode> {
    let Some(command) = args.command else {
        return list(args.user.as_deref(), &args.read).await;
    };
    match command {
        KeyCommand::Create(args) => create(args).await,
        KeyCommand::Revoke { id, write } => {
            let path = path_of(&id);
            let answer = write.target.send(Method::DELETE, &path, None).await?;
            write.done(&format!("key {id}: revoked"), &answer)
        }
        KeyCommand::Rotate { id, grace, told } => {
            let grace = grace.map_or(String::new(), |grace| format!("?grace={}", encoded(&grace)));
            let path = format!("{}/rotate{grace}", path_of(&id));
            told.draw(&path, None).await
        }
    }
}

fn path_of(id: &str) -> String {
    format!("/admin/v1/keys/{}", encoded(id))
}

async fn create(args: CreateKeyArgs) -> anyhow::Result<ExitCode> {
    let mut body = json!({"user": args.user, "models": args.models, "scopes": args.scopes});
    if let Some(name) = args.name {
        body["name"] = json!(name);
    }
    if let Some(after) = args.expires_in {
        let at = SystemTime::now().checked_add(after);
        let Some(at) = at.filter(|_| after < Duration::from_secs(100 * 366 * 24 * 3600)) else {
            bail!("--expires-in: expected a hundred years at most");
        };
        body["expires_at"] = json!(humantime::format_rfc3339_seconds(at).to_string());
    } else if let Some(at) = args.expires_at {
        body["expires_at"] = json!(at);
    }
    args.told.draw("/admin/v1/keys", Some(&body)).await
}

impl SecretArgs {
    /// Requests a new secret, and prints or stores it at once, because it cannot be read again.
    async fn draw(&self, path: &str, body: Option<&Value>) -> anyhow::Result<ExitCode> {
        let file = self.out.as_deref().map(SecretFile::create).transpose()?;
        match self.write.target.send(Method::POST, path, body).await {
            Ok(answer) => self.tell(&answer, file),
            Err(error) => {
                file.map_or(Ok(()), SecretFile::discard)?;
                Err(with_id(error))
            }
        }
    }

    fn tell(&self, answer: &Value, file: Option<SecretFile>) -> anyhow::Result<ExitCode> {
        let (id, secret) = (cell(&answer["id"]), cell(&answer["secret"]));
        let Some(file) = file else {
            if self.write.json {
                return print_json(answer);
            }
            terminal::print(format_args!("id      {id}\nsecret  {secret}"))?;
            return Ok(ExitCode::SUCCESS);
        };
        file.write(&secret)?;
        if self.write.json {
            let mut answer = answer.clone();
            if let Some(answer) = answer.as_object_mut() {
                answer.remove("secret");
            }
            return print_json(&answer);
        }
        let out = self.out.as_deref().unwrap_or(Path::new("-")).display();
        terminal::print(format_args!("id      {id}\nsecret  written to {out}"))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Adds the key's id to an error with an unknown outcome, so that the key can be revoked.
fn with_id(error: anyhow::Error) -> anyhow::Error {
    let answer = error.downcast_ref::<AnswerError>();
    let unknown = answer.filter(|answer| answer.problem["outcome"] == "unknown");
    let Some(id) = unknown.and_then(|answer| answer.problem["id"].as_str()) else {
        return error;
    };
    let hint =
        format!("its secret is lost: if key {id} exists, revoke it with `quorate key revoke {id}`");
    error.context(hint)
}

async fn list(user: Option<&str>, read: &ReadArgs) -> anyhow::Result<ExitCode> {
    let mut keys = read.target.list("/admin/v1/keys", "keys").await?;
    keys.retain(|key| user.is_none_or(|user| key["user"] == user));
    if read.json {
        return print_json(&Value::Array(keys));
    }
    let mut table = FittedTable::new(&[
        column("id"),
        column("name").rank(1),
        column("user"),
        column("state"),
        column("expires").rank(1),
        column("created").rank(3),
        column("models").rank(2),
        column("scopes").rank(2),
    ]);
    for key in &keys {
        table.add_row([
            cell(&key["id"]),
            cell(&key["name"]),
            cell(&key["user"]),
            cell(&key["state"]),
            or_else(&key["expires_at"], "never"),
            cell(&key["created_at"]),
            all_or(&key["models"]),
            all_or(&key["scopes"]),
        ]);
    }
    terminal::print(table)?;
    Ok(ExitCode::SUCCESS)
}

fn or_else(value: &Value, absent: &str) -> String {
    match value {
        Value::Null => absent.to_owned(),
        value => cell(value),
    }
}

/// Joins the names in a list; an empty list means all.
fn all_or(names: &Value) -> String {
    let names = names.as_array().map(Vec::as_slice).unwrap_or_default();
    match names {
        [] => "all".to_owned(),
        names => names.iter().map(cell).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    #[test]
    fn a_key_of_uncertain_creation_is_named() {
        let answered = |outcome| {
            let problem = json!({"title": "t", "outcome": outcome, "id": "00000000000000ab"});
            let status = StatusCode::GATEWAY_TIMEOUT;
            let error = anyhow::Error::from(AnswerError { status, problem });
            format!("{:#}", with_id(error.context("POST")))
        };
        let told = answered("unknown");
        assert!(
            told.contains("quorate key revoke 00000000000000ab"),
            "{told}"
        );
        assert_eq!(
            answered("not-committed"),
            "POST: answered 504 Gateway Timeout: t"
        );
    }
}
