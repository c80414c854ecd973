//! The last calls of this replica that required more than read access, with their callers.
//!
//! Tokens, certificates and their holders are local to each replica. Each call is also logged, for
//! permanent storage.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Uri;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::LogIndex;

use super::roles::{AdminRole, CallerProof};
use api::base::printable::escaped;

/// Number of most recent calls to keep.
const CALLS_MAX: usize = 1000;
/// Maximum length of a recorded path, in bytes.
const PATH_BYTES_MAX: usize = 256;
/// Target of the log lines about calls.
const TARGET: &str = "quorate::audit";

/// Log index of a write, which handlers attach to the response.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteIndex(pub(super) LogIndex);

/// A call that needs a role above `viewer`, whether or not it was allowed.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(super) struct AuditedCall {
    /// Position among the calls of this process, from 1.
    #[serde(skip)]
    pub(super) number: u64,
    /// Unix time, in milliseconds.
    pub(super) at_ms: u64,
    /// Name of the token or certificate; `null`: this listener requires neither.
    pub(super) who: Option<Arc<str>>,
    pub(super) role: Option<AdminRole>,
    /// How the caller authenticated; `null`: this listener does not require it.
    pub(super) by: Option<CallerProof>,
    pub(super) from: Option<IpAddr>,
    pub(super) method: String,
    /// Path with its query, shortened.
    pub(super) path: String,
    /// Status of the response.
    pub(super) status: u16,
    /// Log index, if the call committed anything.
    pub(super) index: Option<LogIndex>,
}

/// The audit of this replica: its last calls that need a role above `viewer`.
#[derive(Debug, Default)]
pub(super) struct CallLog(Mutex<KeptCalls>);

#[derive(Debug, Default)]
struct KeptCalls {
    /// Newest first.
    calls: VecDeque<AuditedCall>,
    /// Total number of calls recorded.
    total: u64,
}

impl CallLog {
    pub(super) fn note(&self, mut call: AuditedCall) {
        tracing::info!(
            target: TARGET,
            who = call.who.as_deref(),
            role = call.role.map(AdminRole::name),
            by = call.by.map(CallerProof::name),
            from = call.from.map(tracing::field::display),
            method = call.method,
            path = call.path,
            status = call.status,
            log_index = call.index.map(|index| index.0),
            "admin call"
        );
        let mut kept = self.kept();
        kept.total += 1;
        call.number = kept.total;
        if kept.calls.len() == CALLS_MAX {
            kept.calls.pop_back();
        }
        kept.calls.push_front(call);
    }

    /// Returns all recorded calls, newest first.
    pub(super) fn newest(&self) -> Vec<AuditedCall> {
        self.kept().calls.iter().cloned().collect()
    }

    fn kept(&self) -> MutexGuard<'_, KeptCalls> {
        // Every change leaves the log consistent, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns path and query of a call for display, shortened to [`PATH_BYTES_MAX`].
pub(super) fn shown_path(uri: &Uri) -> String {
    let target = uri.path_and_query().map_or("", |target| target.as_str());
    let shown = &target[..target.floor_char_boundary(PATH_BYTES_MAX)];
    escaped(shown).into_owned()
}
