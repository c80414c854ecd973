//! `GET /admin/v1/audit`: the last administrative writes, from the replicated state and, with who
//! made them and from where, as they came through this replica.
//!
//! The state knows what was written, the replica that was called knows by whom.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use state::AuditEntry;
use state::ids::LogIndex;

use super::AdminState;
use super::answer::{ListQuery, QueryParams, at_level, json};
use super::calls::AuditedCall;
use super::problem::invalid;
use crate::error::Problem;

#[derive(Serialize)]
struct AuditResponse {
    index: LogIndex,
    /// What the cluster agreed on, by whichever replica.
    writes: Vec<AuditedWrite>,
    /// What was asked of this replica, refused or not.
    calls: Vec<AuditedCall>,
}

#[derive(Serialize)]
struct AuditedWrite {
    #[serde(flatten)]
    entry: AuditEntry,
    /// Name of the token or certificate it was written with, if it came through this replica.
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<IpAddr>,
}

pub(super) async fn audit(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Response, Problem> {
    let limit = query.limit()?;
    if query.cursor.is_some() {
        return Err(invalid("cursor", "given, expected none: the list is short"));
    }
    at_level(&admin, query.read).await?;
    let (mut index, mut entries) = (LogIndex(0), Vec::new());
    admin.cluster.with_state(&mut |state| {
        index = admin.view.applied();
        entries = state.audit().take(limit).cloned().collect();
    });
    let calls = admin.calls.newest();
    let by_index = calls.iter().filter_map(|call| Some((call.index?, call)));
    let by_index: BTreeMap<LogIndex, &AuditedCall> = by_index.collect();
    let writes = entries.into_iter().map(|entry| {
        let call = by_index.get(&entry.index);
        AuditedWrite {
            who: call.and_then(|call| call.who.clone()),
            from: call.and_then(|call| call.from),
            entry,
        }
    });
    Ok(json(&AuditResponse {
        index,
        writes: writes.collect(),
        calls: calls.iter().take(limit).cloned().collect(),
    }))
}
