//! `quorate policy`, `routing`, `admission` and `user defaults`: show and replace replicated
//! settings.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use http::Method;
use lab::terminal;
use serde_json::{Value, json};

use super::client::encoded;
use super::edit::{WriteArgs, document, put, setting};
use super::read::{ReadArgs, details, print_json};

/// Operations on the routing policy.
#[derive(Debug, Subcommand)]
pub(super) enum PolicyCommand {
    /// Show the policy in effect
    Get {
        /// Show the policy of this model [default: the general one]
        #[arg(long, value_name = "NAME")]
        model: Option<String>,
        #[command(flatten)]
        read: ReadArgs,
    },
    /// Replace the policy; omitted settings have their defaults
    Set(SetPolicyArgs),
    /// Remove the policy of a model, so that the general one applies
    Unset {
        /// Name of the model
        #[arg(long, value_name = "NAME")]
        model: String,
        #[command(flatten)]
        write: WriteArgs,
    },
}

/// Arguments of `quorate policy set`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["policy", "file"]))]
pub(super) struct SetPolicyArgs {
    /// Name of the policy
    policy: Option<String>,
    /// Settings of the policy
    #[arg(value_name = "KEY=VALUE", value_parser = setting, requires = "policy")]
    settings: Vec<(String, Value)>,
    /// Read the policy from this file, as `policy get --json` prints it; `-` is stdin
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Set the policy of this model only [default: the general one]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Operations on a table of settings.
#[derive(Debug, Subcommand)]
pub(super) enum SettingsCommand {
    /// Show the settings
    Get(ReadArgs),
    /// Change the given settings, and keep the others
    Set(SetSettingsArgs),
}

/// Arguments of `quorate admission set`, `quorate routing set` and `quorate user defaults set`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["settings", "file"]))]
pub(super) struct SetSettingsArgs {
    /// Settings, such as `max_queue=100` or `max_wait=20s`; `null` resets to the default
    #[arg(value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, Value)>,
    /// Replace all settings with those in this file, as `get --json` prints them; `-` is stdin
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Runs `quorate policy ...`.
pub(super) async fn policy(command: PolicyCommand) -> anyhow::Result<ExitCode> {
    let path = |model: Option<&str>| match model {
        Some(model) => format!("/admin/v1/policy?model={}", encoded(model)),
        None => "/admin/v1/policy".to_owned(),
    };
    match command {
        PolicyCommand::Get { model, read } => get(&path(model.as_deref()), read).await,
        PolicyCommand::Unset { model, write } => {
            let path = path(Some(&model));
            let answer = write.target.send(Method::DELETE, &path, None).await?;
            let what = format!("model {model}: no policy of its own");
            write.done(&what, &answer)
        }
        PolicyCommand::Set(args) => {
            let body = match (&args.file, args.policy) {
                (Some(file), _) => document(file)?,
                (None, policy) => {
                    let mut body = json!({ "policy": policy });
                    for (key, value) in args.settings {
                        put(&mut body, &key, value);
                    }
                    body
                }
            };
            let path = path(args.model.as_deref());
            let answer = args.write.target.send(Method::PUT, &path, Some(&body));
            args.write.done("policy set", &answer.await?)
        }
    }
}

/// Runs `quorate admission ...`, `quorate routing ...` and `quorate user defaults ...`.
pub(super) async fn settings(
    name: &'static str,
    command: SettingsCommand,
) -> anyhow::Result<ExitCode> {
    let path = format!("/admin/v1/{name}");
    match command {
        SettingsCommand::Get(read) => get(&path, read).await,
        SettingsCommand::Set(args) => {
            let target = &args.write.target;
            let change = |mut answer: Value| {
                let mut config = answer["config"].take();
                for (key, value) in &args.settings {
                    put(&mut config, key, value.clone());
                }
                Ok(config)
            };
            let answer = match &args.file {
                Some(file) => {
                    target
                        .send(Method::PUT, &path, Some(&document(file)?))
                        .await?
                }
                None => target.edit(&path, change).await?,
            };
            args.write.done(&format!("{name} set"), &answer)
        }
    }
}

async fn get(path: &str, read: ReadArgs) -> anyhow::Result<ExitCode> {
    let answer = read.target.get(path).await?;
    if read.json {
        return print_json(&answer);
    }
    let config = answer.get("config");
    let config = config.with_context(|| format!("GET {path}: the response has no config"))?;
    terminal::print(details(config))?;
    Ok(ExitCode::SUCCESS)
}
