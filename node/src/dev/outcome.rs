//! Result of a dev run: the load's report and whether the replicas agree.

use std::time::Duration;

use lab::replay::report::LoadReport;
use lab::replay::tables;
use lab::terminal::{FittedTable, column};
use serde_json::{Value, json};
use state::ids::LogIndex;
use tokio::time::Instant;

use super::fleet::{Fleet, FleetReplica, wait_on};

/// Maximum time to wait until all updates are applied everywhere.
const AGREE_DEADLINE: Duration = Duration::from_secs(10);

/// Explanation of the columns of the results.
const LEGEND: &str = "\
lost: no answer, as the replica had gone. TTFT: time to the first token, in ms.
cached %: prompt tokens that the engines found in their caches; predicted %:
that the router expected there. service: prompt tokens and twice the output
tokens. digest: of the replicated state; equal digests are equal states.";

/// State of a replica after the load test.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReplicaSummary {
    role: &'static str,
    term: u64,
    applied: LogIndex,
    digest: u128,
    blocks: u64,
    leases: usize,
    users: usize,
}

/// Result of a dev run: the load's report and the states of the replicas.
pub(super) struct DevOutcome {
    report: LoadReport,
    standings: Vec<ReplicaSummary>,
}

impl DevOutcome {
    /// Waits until every replica has applied the same entries and no lease is open, or until a
    /// deadline. Then records their states.
    pub(super) async fn of(report: LoadReport, fleet: &Fleet) -> Self {
        let deadline = Instant::now() + AGREE_DEADLINE;
        loop {
            let standings: Vec<ReplicaSummary> = fleet.replicas.iter().map(standing).collect();
            let outcome = Self {
                report: report.clone(),
                standings,
            };
            let is_late = wait_on(deadline, "the replicas did not agree")
                .await
                .is_err();
            if is_late || (outcome.agrees() && outcome.is_at_rest()) {
                return outcome;
            }
        }
    }

    fn agrees(&self) -> bool {
        let first = &self.standings[0];
        self.standings
            .iter()
            .all(|other| other.applied == first.applied && other.digest == first.digest)
    }

    fn is_at_rest(&self) -> bool {
        self.standings.iter().all(|standing| standing.leases == 0)
    }

    /// Whether no request failed, every replica holds the same state, and no lease is open.
    pub(super) fn is_good(&self) -> bool {
        let total = &self.report.total;
        total.failed == 0 && total.lost == 0 && self.agrees() && self.is_at_rest()
    }

    /// Returns the result as JSON.
    pub(super) fn json(&self) -> Value {
        let replicas = (1..).zip(&self.standings).map(|(id, standing): (u8, _)| {
            json!({
                "id": id,
                "role": standing.role,
                "term": standing.term,
                "applied": standing.applied,
                "digest": format!("{:032x}", standing.digest),
                "blocks": standing.blocks,
                "open_leases": standing.leases,
                "users": standing.users,
            })
        });
        json!({
            "is_good": self.is_good(),
            "load": self.report,
            "replicas": replicas.collect::<Value>(),
        })
    }

    /// Formats the result as text.
    pub(super) fn tables(&self) -> String {
        let mut table = FittedTable::new(&[
            column("replica"),
            column("role"),
            column("term").number().rank(2),
            column("applied").number(),
            column("digest"),
            column("blocks").number(),
            column("open leases").number().rank(1),
            column("users").number().rank(1),
        ]);
        for (id, standing) in (1..).zip(&self.standings) {
            table.add_row([
                format!("{id}"),
                standing.role.to_owned(),
                standing.term.to_string(),
                standing.applied.to_string(),
                // The first half suffices to distinguish states.
                format!("{:016x}", standing.digest >> 64),
                standing.blocks.to_string(),
                standing.leases.to_string(),
                standing.users.to_string(),
            ]);
        }
        let requests = match self.report.total.failed + self.report.total.lost {
            0 => "No request failed".to_owned(),
            failed => format!("{failed} requests FAILED"),
        };
        let states = match (self.agrees(), self.is_at_rest()) {
            (true, true) => "all replicas hold the same state",
            (true, false) => "all replicas hold the same state, but leases are LEFT OPEN",
            (false, _) => "the replicas DIFFER",
        };
        let verdict = format!("{requests}; {states}.");
        format!("{}\n{table}\n\n{LEGEND}\n\n{verdict}", tables(&self.report))
    }
}

fn standing(replica: &FleetReplica) -> ReplicaSummary {
    let status = replica.cluster.status();
    let mut standing = ReplicaSummary {
        role: status.role,
        term: status.term,
        applied: LogIndex(0),
        digest: 0,
        blocks: 0,
        leases: 0,
        users: 0,
    };
    replica.cluster.with_state(&mut |state| {
        standing.applied = state.applied();
        standing.digest = state.digest();
        standing.blocks = state.owned_blocks_all();
        standing.leases = state.open_leases();
        standing.users = state.users_len();
    });
    standing
}
