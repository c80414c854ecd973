//! `quorate member`, `transfer-leader` and `snapshot`: operate the cluster through the admin API.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use http::Method;
use serde_json::{Value, json};

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
    /// Replace a lost or damaged replica by one with a new id: wait until that one has joined, make
    /// it a voter, and remove the old one
    ///
    /// Give the replica an empty data directory and, in its config, a `node.id` that no replica ever
    /// had; nothing else changes. Start it before or after this command.
    Replace {
        /// `node.id` of the lost replica
        #[arg(value_parser = ids())]
        id: u8,
        /// New `node.id` of the replica [default: the highest of the members, plus 1]
        #[arg(long = "as", value_name = "ID", value_parser = ids())]
        new: Option<u8>,
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
        MemberCommand::Replace { id, new, write } => return replace(id, new, write).await,
        MemberCommand::Remove { id, write } => {
            let path = format!("{members}/{id}");
            let done = format!("replica {id}: removed");
            (write, Method::DELETE, path, None, done)
        }
    };
    let answer = write.target.send(method, &path, body.as_ref()).await?;
    write.done(&done, &answer)
}

/// Interval at which the new replica is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Runs `quorate member replace`. The new replica votes before the old one is removed, so that the
/// quorum never depends on fewer replicas than before. Each step can be repeated.
async fn replace(old: u8, new: Option<u8>, write: WriteArgs) -> anyhow::Result<ExitCode> {
    let target = &write.target;
    let members = "/admin/v1/cluster/members";
    let cluster = target.get("/admin/v1/cluster").await?;
    let all = cluster["members"].as_object().cloned().unwrap_or_default();
    let ids = || all.keys().filter_map(|id| id.parse::<u8>().ok());
    let Some(lost) = all.get(&old.to_string()) else {
        let ids: Vec<String> = ids().map(|id| id.to_string()).collect();
        bail!(
            "no member has the id {old}; the members are {}",
            ids.join(", ")
        );
    };
    // A member may be found to answer only after a moment.
    let must_be_lost = |old_member: &Value| {
        if old_member["is_connected"] == true {
            bail!("replica {old} answers: stop it, or use `quorate member remove {old}`");
        }
        Ok(())
    };
    must_be_lost(lost)?;
    let new = match new.or_else(|| ids().max()?.checked_add(1)) {
        Some(new) if new != old => new,
        _ => bail!("expected --as with an id from 1 to 255 that no replica ever had"),
    };
    let joined = async || -> anyhow::Result<Value> {
        let cluster = target.get("/admin/v1/cluster").await?;
        let members = &cluster["members"];
        must_be_lost(&members[old.to_string()])?;
        Ok(members[new.to_string()].clone())
    };
    let mut found = joined().await?;
    if found.is_null() {
        let address = cell(&lost["peer"]);
        eprintln!(
            "waiting for replica {new}: set `node.id = {new}` in the config of the replica at \
             {address}, with an empty data directory, and start it"
        );
    }
    while found["is_connected"] != true {
        tokio::time::sleep(LOOK_INTERVAL).await;
        found = joined().await?;
    }
    if found["is_voter"] != true {
        eprintln!("replica {new} has joined; it catches up, and then votes");
        let path = format!("{members}/{new}/promote");
        target.send(Method::POST, &path, None).await?;
    }
    let path = format!("{members}/{old}");
    let answer = target.send(Method::DELETE, &path, None).await?;
    write.done(
        &format!("replica {new} votes in place of replica {old}"),
        &answer,
    )
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
