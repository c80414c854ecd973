//! `quorate member`, `transfer-leader`, `snapshot`: operate the cluster through the admin API.

use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use lab::terminal;
use serde_json::{Value, json};

use super::client::AdminTarget;

/// Returns a parser for values of `node.id`.
fn ids() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..)
}

/// Changes of membership.
#[derive(Debug, Subcommand)]
pub(super) enum MemberCommand {
    /// Add a running replica as a learner
    Add {
        /// Its `node.id`
        #[arg(value_parser = ids())]
        id: u8,
        /// Host and port of its peer listener
        address: String,
        #[command(flatten)]
        target: AdminTarget,
    },
    /// Make a learner a voter
    Promote {
        /// Its `node.id`
        #[arg(value_parser = ids())]
        id: u8,
        #[command(flatten)]
        target: AdminTarget,
    },
    /// Remove a member
    Remove {
        /// Its `node.id`
        #[arg(value_parser = ids())]
        id: u8,
        #[command(flatten)]
        target: AdminTarget,
    },
}

/// `quorate transfer-leader`.
#[derive(Debug, clap::Args)]
pub(super) struct TransferLeaderArgs {
    /// `node.id` of the new leader [default: the most up-to-date voter]
    #[arg(value_parser = ids())]
    to: Option<u8>,
    #[command(flatten)]
    target: AdminTarget,
}

/// `quorate snapshot`.
#[derive(Debug, clap::Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    target: AdminTarget,
}

/// Runs `quorate member ...`.
pub(super) async fn member(command: MemberCommand) -> anyhow::Result<ExitCode> {
    let members = "/admin/v1/cluster/members";
    let (target, method, path, body) = match command {
        MemberCommand::Add {
            id,
            address,
            target,
        } => {
            let body = json!({ "id": id, "address": address });
            (target, Method::POST, members.to_owned(), Some(body))
        }
        MemberCommand::Promote { id, target } => (
            target,
            Method::POST,
            format!("{members}/{id}/promote"),
            None,
        ),
        MemberCommand::Remove { id, target } => {
            (target, Method::DELETE, format!("{members}/{id}"), None)
        }
    };
    show(&target.send(method, &path, body.as_ref()).await?)
}

/// Runs `quorate transfer-leader`.
pub(super) async fn transfer_leader(args: TransferLeaderArgs) -> anyhow::Result<ExitCode> {
    let body = args.to.map_or_else(|| json!({}), |to| json!({ "to": to }));
    let path = "/admin/v1/cluster/transfer-leader";
    show(&args.target.send(Method::POST, path, Some(&body)).await?)
}

/// Runs `quorate snapshot`.
pub(super) async fn snapshot(args: SnapshotArgs) -> anyhow::Result<ExitCode> {
    show(
        &args
            .target
            .send(Method::POST, "/admin/v1/cluster/snapshot", None)
            .await?,
    )
}

fn show(answer: &Value) -> anyhow::Result<ExitCode> {
    terminal::print(serde_json::to_string(answer)?)?;
    Ok(ExitCode::SUCCESS)
}
