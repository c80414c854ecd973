//! `quorate settings` and `quorate user defaults`: show and change replicated settings.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{Subcommand, ValueEnum};
use http::Method;
use lab::terminal;
use serde_json::{Value, json};

use super::client::encoded;
use super::edit::{WriteArgs, document, put, setting};
use super::read::{ReadArgs, details, print_json};

const ROUTING: &str = "/admin/v1/routing";
const ADMISSION: &str = "/admin/v1/admission";
const USER_DEFAULTS: &str = "/admin/v1/users/defaults";

/// Operations on the cluster's settings.
#[derive(Debug, Subcommand)]
pub(super) enum SettingsCommand {
    /// Show a group of settings
    Get {
        /// Group of settings
        group: Group,
        /// Show the policy of this model [default: the general one]
        #[arg(long, value_name = "NAME")]
        model: Option<String>,
        #[command(flatten)]
        read: ReadArgs,
    },
    /// Change settings
    #[command(subcommand)]
    Set(SetCommand),
}

/// Groups of settings, each an object of the admin API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Group {
    /// The routing policy
    Policy,
    /// Policies of models, and other routing settings
    Routing,
    /// Order, queue and limits
    Admission,
}

/// Changes of a group of settings.
#[derive(Debug, Subcommand)]
pub(super) enum SetCommand {
    /// Replace the routing policy, or that of a model; omitted settings have their defaults
    Policy(SetPolicyArgs),
    /// Change the given routing settings, and keep the others
    Routing(SetArgs),
    /// Change the given admission settings, and keep the others
    Admission(SetArgs),
}

/// Operations on the defaults of users.
#[derive(Debug, Subcommand)]
pub(super) enum DefaultsCommand {
    /// Show the defaults
    Get(ReadArgs),
    /// Change the given defaults, and keep the others
    Set(SetArgs),
}

/// Arguments of `quorate settings set policy`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["policy", "file", "unset"]))]
pub(super) struct SetPolicyArgs {
    /// Name of the policy
    policy: Option<String>,
    /// Settings of the policy
    #[arg(value_name = "KEY=VALUE", value_parser = setting, requires = "policy")]
    settings: Vec<(String, Value)>,
    /// Read the policy from this file, as `settings get policy --json` prints it; `-` is stdin
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Set the policy of this model only [default: the general one]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Remove the policy of the model, so that the general one applies
    #[arg(long, requires = "model")]
    unset: bool,
    #[command(flatten)]
    write: WriteArgs,
}

/// Arguments of `quorate settings set routing|admission` and `quorate user defaults set`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["settings", "file"]))]
pub(super) struct SetArgs {
    /// Settings, such as `max_queue=100` or `max_wait=20s`; `null` resets to the default
    #[arg(value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, Value)>,
    /// Replace all settings with those in this file, as `get --json` prints them; `-` is stdin
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Runs `quorate settings ...`.
pub(super) async fn run(command: SettingsCommand) -> anyhow::Result<ExitCode> {
    match command {
        SettingsCommand::Get { group, model, read } => {
            let path = match group {
                Group::Policy => policy_path(model.as_deref()),
                Group::Routing | Group::Admission if model.is_some() => {
                    let message = "`--model` is for `settings get policy`\n";
                    clap::Error::raw(ErrorKind::ArgumentConflict, message).exit()
                }
                Group::Routing => ROUTING.to_owned(),
                Group::Admission => ADMISSION.to_owned(),
            };
            get(&path, read).await
        }
        SettingsCommand::Set(SetCommand::Policy(args)) => set_policy(args).await,
        SettingsCommand::Set(SetCommand::Routing(args)) => set(ROUTING, "routing", args).await,
        SettingsCommand::Set(SetCommand::Admission(args)) => {
            set(ADMISSION, "admission", args).await
        }
    }
}

/// Runs `quorate user defaults ...`.
pub(super) async fn user_defaults(command: DefaultsCommand) -> anyhow::Result<ExitCode> {
    match command {
        DefaultsCommand::Get(read) => get(USER_DEFAULTS, read).await,
        DefaultsCommand::Set(args) => set(USER_DEFAULTS, "defaults of users", args).await,
    }
}

/// Returns the path of the general policy, or of that of a model.
fn policy_path(model: Option<&str>) -> String {
    match model {
        Some(model) => format!("/admin/v1/policy?model={}", encoded(model)),
        None => "/admin/v1/policy".to_owned(),
    }
}

async fn set_policy(args: SetPolicyArgs) -> anyhow::Result<ExitCode> {
    let path = policy_path(args.model.as_deref());
    let target = &args.write.target;
    if args.unset {
        let answer = target.send(Method::DELETE, &path, None).await?;
        let model = args.model.unwrap_or_default();
        let done = format!("model {model}: no policy of its own");
        return args.write.done(&done, &answer);
    }
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
    let answer = target.send(Method::PUT, &path, Some(&body)).await?;
    args.write.done("policy set", &answer)
}

/// Changes the settings at `path`, called `name` in the output.
async fn set(path: &str, name: &str, args: SetArgs) -> anyhow::Result<ExitCode> {
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
                .send(Method::PUT, path, Some(&document(file)?))
                .await?
        }
        None => target.edit(path, change).await?,
    };
    args.write.done(&format!("{name} set"), &answer)
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
