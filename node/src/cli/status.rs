//! `quorate status`: what a replica knows of its cluster, and whether all of them agree.

use std::process::ExitCode;

use api::base::printable::escaped;
use lab::terminal::{self, FittedTable, column};
use serde_json::{Value, json};

use super::everywhere::{self, VerifiedState};
use super::read::{ReadArgs, json_text, members};
use super::table::cell;
use super::watch::{WatchArgs, watch};

/// Maximum number of a source's rejected engines that `status` shows.
const REFUSED_SHOWN: usize = 5;

/// Arguments of `quorate status`.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    watch: WatchArgs,
    /// Compare the states of all members at one log index; fails if any differs
    #[arg(long)]
    verify: bool,
}

/// Runs `quorate status`, with `--watch` repeatedly.
pub(super) async fn watch_status(args: StatusArgs) -> anyhow::Result<ExitCode> {
    watch(args.watch, async |read| status(read, args.verify).await).await
}

/// Returns the output of `quorate status`. For a replica that is not ready, shows its status and fails. With
/// `is_verified` also if the replicas' states differ, or one does not answer.
async fn status(args: &ReadArgs, is_verified: bool) -> anyhow::Result<(String, ExitCode)> {
    let cluster = args.target.get("/admin/v1/cluster").await?;
    let digest = args.target.get("/admin/v1/digest").await?;
    let readiness = args.target.readiness().await?;
    let defaults = args.target.get("/admin/v1/users/defaults").await?;
    let discovery = args.target.get("/admin/v1/discovery").await?;
    let verified = match is_verified {
        true => Some(everywhere::verify(&args.target).await?),
        false => None,
    };
    let code = exit_code(&readiness, verified.as_ref());
    if args.json {
        let mut all = json!({
            "cluster": cluster, "digest": digest, "readiness": readiness,
            "user_defaults": defaults, "discovery": discovery,
        });
        all["verified"] = verified.map_or(Value::Null, |it| it.json());
        return Ok((json_text(&all)?, code));
    }
    let found = cluster["peers"].as_array().filter(|it| !it.is_empty());
    let reasons = readiness["reasons"].as_array().into_iter().flatten();
    // The table has more detail about peers.
    let reasons = reasons.filter(|it| found.is_none() || !is_of_peer(it));
    let warnings = readiness["warnings"].as_array().into_iter().flatten();
    let reasons: Vec<String> = reasons
        .chain(warnings)
        .map(|reason| format!("\n{}", terminal::indented(&cell(reason), 9)))
        .collect();
    let lines = [
        format!(
            "replica {} is {} in term {}, version {}",
            cell(&cluster["id"]),
            cell(&cluster["role"]),
            cell(&cluster["term"]),
            cell(&cluster["version"]),
        ),
        format!(
            "state    {}{}{}",
            cell(&readiness["status"]),
            consequence(&readiness),
            reasons.concat()
        ),
        format!("cluster  {}", cell(&cluster["cluster_id"])),
        format!("leader   {}", leader(&cluster["leader"])),
        format!("quorum   {}", quorum(&cluster)),
        format!(
            "index    committed {}, applied {}, snapshot {}",
            cell(&cluster["committed_index"]),
            cell(&cluster["applied_index"]),
            cell(&cluster["snapshot_index"]),
        ),
        format!(
            "digest   {} at {}",
            cell(&digest["digest"]),
            cell(&digest["index"])
        ),
    ];
    let mut lines = Vec::from(lines);
    lines.extend(verified.iter().flat_map(VerifiedState::lines));
    lines.extend(unsalted(&defaults).into_iter().chain(sources(&discovery)));
    let has_members = cluster["members"]
        .as_object()
        .is_some_and(|it| !it.is_empty());
    let members = has_members.then(|| members(&cluster));
    let tables = members.into_iter().chain(found.map(|found| peers(found)));
    let tables: Vec<_> = tables.map(|table| table.to_string()).collect();
    let text = format!("{}\n\n{}", lines.join("\n"), tables.join("\n\n"));
    Ok((text, code))
}

fn exit_code(readiness: &Value, verified: Option<&VerifiedState>) -> ExitCode {
    let is_alike = verified.is_none_or(VerifiedState::is_alike);
    match readiness["status"].as_str() {
        Some("ready" | "degraded") if is_alike => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Describes what becomes of requests and changes, if not all are served.
fn consequence(readiness: &Value) -> String {
    let told = readiness["consequence"].as_str();
    told.map_or_else(String::new, |told| format!(": {}", escaped(told)))
}

fn leader(leader: &Value) -> String {
    match leader {
        Value::Null => "none".to_owned(),
        leader => cell(leader),
    }
}

/// Describes whether there is a quorum, and how many more failures it survives.
fn quorum(cluster: &Value) -> String {
    let has_quorum = cell(&cluster["has_quorum"]);
    match cluster["failures_survived"].as_u64() {
        None => has_quorum,
        Some(0) => format!("{has_quorum}; the failure of one more voter would lose it"),
        Some(1) => format!("{has_quorum}; it survives the failure of 1 more voter"),
        Some(more) => format!("{has_quorum}; it survives the failure of {more} more voters"),
    }
}

/// Lists the engines that do not isolate users' caches, if users may be isolated.
fn unsalted(defaults: &Value) -> Option<String> {
    let backends = defaults["unsalted_backends"].as_array()?;
    let is_asked = defaults["config"]["cache"] != "shared"
        || defaults["users_with_own_cache"].as_u64() > Some(0);
    if backends.is_empty() || !is_asked {
        return None;
    }
    let names: Vec<String> = backends.iter().map(cell).collect();
    let told = format!(
        "{}: the engines ignore `cache_salt`, or are not known to support it",
        names.join(", ")
    );
    Some(format!(
        "unsalted {}",
        terminal::indented(&told, 9).trim_start()
    ))
}

/// Returns one line per source of engines, followed by its problems.
fn sources(discovery: &Value) -> Vec<String> {
    let all = |name: &str| discovery[name].as_array().into_iter().flatten();
    let mut lines = Vec::new();
    for source in all("sources") {
        let count = |name: &str| source[name].as_u64().unwrap_or(0);
        let mut line = format!(
            "source   {}: {} engines listed, {} registered",
            cell(&source["id"]),
            count("told"),
            // Those that the source lost still are, until they have drained.
            count("registered").saturating_sub(count("lost")),
        );
        for (name, words) in [
            ("lost", "lost"),
            ("withheld", "kept though not listed"),
            ("refused_total", "refused"),
        ] {
            if count(name) > 0 {
                line += &format!(", {} {words}", count(name));
            }
        }
        lines.push(line);
        let faults = [("error", "no response: "), ("failure", "not changed: ")];
        for (name, words) in faults {
            if !source[name].is_null() {
                lines.push(format!("         {words}{}", cell(&source[name])));
            }
        }
        let refused = source["refused"].as_array().into_iter().flatten();
        for refused in refused.take(REFUSED_SHOWN) {
            let (engine, reason) = (cell(&refused["engine"]), cell(&refused["reason"]));
            lines.push(format!("         {engine}: {reason}"));
        }
    }
    let orphans: Vec<String> = all("orphans").map(|it| cell(&it["backend"])).collect();
    if !orphans.is_empty() {
        let told = orphans.join(", ");
        lines.push(format!(
            "orphans  {told}: registered by sources that this replica does not have"
        ));
    }
    lines
}

/// Whether the reason for which a replica is not ready concerns one peer.
fn is_of_peer(reason: &Value) -> bool {
    reason.as_str().is_some_and(|it| it.starts_with("peer "))
}

/// Returns a table of what a replica without a quorum found at the addresses of its peers.
fn peers(found: &[Value]) -> FittedTable {
    let columns = [column("peer"), column("found"), column("detail").prose()];
    let mut table = FittedTable::new(&columns);
    for peer in found {
        table.add_row([&peer["address"], &peer["state"], &peer["detail"]].map(cell));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsalted_engines_are_named_if_isolation_needs_salts() {
        let cache = |cache: &str, users: u64, backends: Value| json!({ "config": { "cache": cache }, "users_with_own_cache": users, "unsalted_backends": backends });
        let all = || json!(["a", "b"]);
        assert_eq!(unsalted(&cache("shared", 0, all())), None);
        assert_eq!(unsalted(&cache("isolated", 0, json!([]))), None);
        for cache in [cache("group:a", 0, all()), cache("shared", 1, all())] {
            let told = unsalted(&cache).unwrap();
            assert!(told.starts_with("unsalted a, b: "), "{told}");
        }
    }
}
