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
use state::ids::{ApiKeyId, LogIndex};
use state::keys::KeysView;
use state::{AuditAction, AuditEntry};

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
    let keys = admin.view.keys();
    let ended: Vec<String> = entries
        .iter()
        .filter(is_of_key)
        .map(|it| it.subject.clone())
        .collect();
    let writes = entries.into_iter().map(|mut entry| {
        if is_of_key(&&entry) {
            entry.subject = key_subject(&keys, &ended, entry.subject);
        }
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

/// Whether a write was one of an API key.
fn is_of_key(entry: &&AuditEntry) -> bool {
    matches!(
        entry.action,
        AuditAction::CreateKey | AuditAction::RevokeKey | AuditAction::RotateKey
    )
}

/// A key with name and user: as it is, or as it was when it was revoked, which `told` has.
fn key_subject(keys: &KeysView, told: &[String], id: String) -> String {
    let number = u64::from_str_radix(&id, 16).ok();
    let live = number.and_then(|number| keys.get(ApiKeyId(number)));
    let ended = || {
        let of_it = |subject: &&String| subject.starts_with(&format!("{id}: "));
        told.iter().find(of_it).cloned()
    };
    live.map(|key| key.subject()).or_else(ended).unwrap_or(id)
}
