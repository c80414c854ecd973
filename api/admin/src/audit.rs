//! `GET /admin/v1/audit`: the last administrative writes, from the replicated state, and the last
//! calls of this replica (`calls`). A write has a caller and an address only if its call is among
//! them.
//!
//! The state records what was written; only the replica that was called knows the writer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{ApiKeyId, LogIndex};
use state::keys::KeysView;
use state::{AuditAction, AuditEntry};

use super::AdminState;
use super::answer::{Answer, ListQuery, QueryParams, at_level};
use super::calls::AuditedCall;
use super::problem::invalid;
use api::error::Problem;

#[derive(Serialize, JsonSchema)]
pub(super) struct AuditResponse {
    index: LogIndex,
    /// Committed writes, through any replica.
    writes: Vec<AuditedWrite>,
    /// Calls to this replica that need a role above `viewer`, including those refused for lack of a
    /// role.
    calls: Vec<AuditedCall>,
    /// Value of `cursor` for the next page of both; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct AuditedWrite {
    #[serde(flatten)]
    entry: AuditEntry,
    /// Name of the token or certificate that the write was made with, if it went through this
    /// replica.
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<IpAddr>,
}

pub(super) async fn audit(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Answer<AuditResponse>, Problem> {
    let limit = query.limit()?;
    let before = AuditCursor::of(query.cursor.as_deref())?;
    at_level(&admin, query.read).await?;
    let (mut index, mut all) = (LogIndex(0), Vec::new());
    admin.cluster.with_state(&mut |state| {
        index = admin.view.applied();
        all = state.audit().cloned().collect::<Vec<_>>();
    });
    let calls = admin.calls.newest();
    let by_index = calls.iter().filter_map(|call| Some((call.index?, call)));
    let by_index: BTreeMap<LogIndex, &AuditedCall> = by_index.collect();
    let keys = admin.view.keys();
    let ended = all.iter().filter(is_of_key).map(|it| it.subject.clone());
    let ended: Vec<String> = ended.collect();
    let (shown, more_writes) = page(&all, limit, |entry| entry.index < before.index);
    let writes = shown.iter().map(|entry| {
        let mut entry = entry.clone();
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
    let (shown_calls, more_calls) = page(&calls, limit, |call| call.number < before.number);
    let next = AuditCursor {
        index: shown.last().map_or(before.index, |entry| entry.index),
        number: shown_calls.last().map_or(before.number, |call| call.number),
    };
    Ok(Answer(AuditResponse {
        index,
        writes: writes.collect(),
        calls: shown_calls.to_vec(),
        next_cursor: (more_writes || more_calls).then(|| next.text()),
    }))
}

/// Position in the audit, from which a page continues with earlier writes and calls.
struct AuditCursor {
    index: LogIndex,
    number: u64,
}

impl AuditCursor {
    fn of(cursor: Option<&str>) -> Result<Self, Problem> {
        let Some(cursor) = cursor else {
            return Ok(Self {
                index: LogIndex(u64::MAX),
                number: u64::MAX,
            });
        };
        let parts = cursor.split_once('-');
        let read = parts.and_then(|(index, number)| {
            Some(Self {
                index: LogIndex(index.parse().ok()?),
                number: number.parse().ok()?,
            })
        });
        read.ok_or_else(|| invalid("cursor", format!("{cursor:?}, expected a next_cursor")))
    }

    fn text(&self) -> String {
        format!("{}-{}", self.index, self.number)
    }
}

/// Returns at most `limit` entries of `all`, starting with the first one that satisfies `is_next`,
/// and whether more follow.
fn page<T>(all: &[T], limit: usize, is_next: impl Fn(&T) -> bool) -> (&[T], bool) {
    let from = all.partition_point(|it| !is_next(it));
    let left = &all[from..];
    (&left[..left.len().min(limit)], left.len() > limit)
}

/// Whether a write concerned an API key.
fn is_of_key(entry: &&AuditEntry) -> bool {
    matches!(
        entry.action,
        AuditAction::CreateKey | AuditAction::RevokeKey | AuditAction::RotateKey
    )
}

/// Returns the name and user of the key `id`: the current ones, those in `told` from its
/// revocation, or else just `id`.
fn key_subject(keys: &KeysView, told: &[String], id: String) -> String {
    let number = u64::from_str_radix(&id, 16).ok();
    let live = number.and_then(|number| keys.get(ApiKeyId(number)));
    let ended = || {
        let of_it = |subject: &&String| subject.starts_with(&format!("{id}: "));
        told.iter().find(of_it).cloned()
    };
    live.map(|key| key.subject()).or_else(ended).unwrap_or(id)
}
