//! Orders a request after what its client has seen, for clients that ask for it with
//! `x-quorate-min-index`: the decision waits until this replica has applied the index that the
//! client names, and the response until the log has the request's own prompt. The client passes the
//! index of that response to its next request, which then finds the prompt through any replica.

use std::time::Duration;

use state::ids::LogIndex;
use tokio::time::timeout;

use super::request_context::ProxiedRequest;
use crate::proxy::Proxy;
use crate::routing::{Attempt, Decision};

/// Time between two looks at the applied index.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Waits until this replica has applied the index that the request names, or for as long as the
/// config allows.
pub(in crate::proxy) async fn catch_up(proxy: &Proxy, min_index: Option<LogIndex>) {
    let Some(min_index) = min_index.filter(|index| proxy.view.applied() < *index) else {
        return;
    };
    let applied = async {
        while proxy.view.applied() < min_index {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    // The response says which index was reached.
    let _late = timeout(proxy.settings.min_index_wait, applied).await;
}

/// Returns the index for the response: the one of the `decision`, or, for a client that waits for it,
/// the one at which the request's own prompt is known.
pub(in crate::proxy) async fn known_at(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
    decision: &Decision,
    attempt: &Attempt,
) -> LogIndex {
    if proxied.preferences.min_index.is_none() {
        return decision.index;
    }
    let known = match attempt.known_at() {
        Ok(index) => Some(index),
        Err(commit) => {
            let committed = timeout(proxy.settings.min_index_wait, commit).await;
            committed.ok().and_then(Result::ok)
        }
    };
    known.map_or(decision.index, |index| index.max(decision.index))
}
