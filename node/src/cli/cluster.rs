//! `quorate member`, `transfer-leader` and `snapshot`: operate the cluster through the admin API.

use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use serde_json::json;

use super::edit::WriteArgs;
use super::table::cell;

/// Returns a parser for values of `node.id`.
fn ids() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..)
}

/// Changes of membership.
#[derive(Debug, Subcommand)]
pub(super) enum MemberCommand {
    /// Add a running replica as a learner
    Add {
        /// `node.id` of the replica
        #[arg(value_parser = ids())]
        id: u8,
        /// Host and port of the replica's peer listener
        address: String,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Make a learner a voter
    Promote {
        /// `node.id` of the replica
        #[arg(value_parser = ids())]
        id: u8,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Remove a member
    Remove {
        /// `node.id` of the replica
        #[arg(value_parser = ids())]
        id: u8,
        #[command(flatten)]
        write: WriteArgs,
    },
}

/// Arguments of `quorate transfer-leader`.
#[derive(Debug, clap::Args)]
pub(super) struct TransferLeaderArgs {
    /// `node.id` of the new leader [default: the most up-to-date voter]
    #[arg(value_parser = ids())]
    to: Option<u8>,
    #[command(flatten)]
    write: WriteArgs,
}

/// Arguments of `quorate snapshot`.
#[derive(Debug, clap::Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    write: WriteArgs,
}

/// Runs `quorate member ...`.
pub(super) async fn member(command: MemberCommand) -> anyhow::Result<ExitCode> {
    let members = "/admin/v1/cluster/members";
    let (write, method, path, body, done) = match command {
        MemberCommand::Add { id, address, write } => {
            let body = json!({ "id": id, "address": address });
            let done = format!("replica {id}: added as a learner");
            (write, Method::POST, members.to_owned(), Some(body), done)
        }
        MemberCommand::Promote { id, write } => {
            let path = format!("{members}/{id}/promote");
            let done = format!("replica {id}: votes");
            (write, Method::POST, path, None, done)
        }
        MemberCommand::Remove { id, write } => {
            let path = format!("{members}/{id}");
            let done = format!("replica {id}: removed");
            (write, Method::DELETE, path, None, done)
        }
    };
    let answer = write.target.send(method, &path, body.as_ref()).await?;
    write.done(&done, &answer)
}

/// Runs `quorate transfer-leader`.
pub(super) async fn transfer_leader(args: TransferLeaderArgs) -> anyhow::Result<ExitCode> {
    let body = args.to.map_or_else(|| json!({}), |to| json!({ "to": to }));
    let path = "/admin/v1/cluster/transfer-leader";
    let answer = args.write.target.send(Method::POST, path, Some(&body));
    let answer = answer.await?;
    let done = format!("replica {} leads", cell(&answer["leader"]));
    args.write.done(&done, &answer)
}

/// Runs `quorate snapshot`.
pub(super) async fn snapshot(args: SnapshotArgs) -> anyhow::Result<ExitCode> {
    let path = "/admin/v1/cluster/snapshot";
    let answer = args.write.target.send(Method::POST, path, None).await?;
    args.write.done("snapshot taken", &answer)
}
