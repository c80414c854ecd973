//! Hostile engines, and servers that are no engines. Their data must neither pile up in the router
//! nor reach a client as a response.

use std::sync::Mutex;

use anyhow::ensure;
use futures_util::future::try_join_all;
use http::StatusCode;

use super::context::{AbuseContext, outcome};
use crate::processes::until;

/// Engine behaviour, whether the request is for a stream, the statuses that the client may get, and
/// text that the response must contain.
type HostileCase = (&'static str, bool, &'static [u16], &'static str);

const CASES: &[HostileCase] = &[
    ("endless-line", true, &[200, 502], ""),
    ("endless-head", false, &[502], "backend_broke"),
    ("endless-continue", false, &[502], "backend_broke"),
    ("endless-document", false, &[200, 502], ""),
    ("absurd", false, &[200], "usage"),
    ("redirect", false, &[502], "backend_redirects"),
    ("early", false, &[200, 502], ""),
    ("refusing", true, &[503], "queue is full"),
    ("comments", true, &[200], "backend_timeout"),
];

/// Sends a request for each hostile behaviour to every replica. Afterwards the user must still be
/// served, whatever the charges.
pub(super) async fn hostile(context: &AbuseContext) -> anyhow::Result<()> {
    let replicas = || 0..context.data.len();
    for case in CASES {
        try_join_all(replicas().map(|replica| one(context, replica, case))).await?;
    }
    for replica in replicas() {
        let (status, text) = outcome(context.ask(replica, "plain.after", false)).await;
        ensure!(
            status == Some(StatusCode::OK),
            "afterwards: {status:?} {text}"
        );
    }
    Ok(())
}

async fn one(context: &AbuseContext, replica: usize, case: &HostileCase) -> anyhow::Result<()> {
    let (behaviour, is_streamed, statuses, words) = case;
    let id = format!("{behaviour}.{replica}");
    // The router rightly ejects such an engine for a moment.
    let answer = Mutex::new(None);
    until("the engine is tried again", async || {
        let (status, text) = outcome(context.ask(replica, &id, *is_streamed)).await;
        let is_tried = !text.contains("no_healthy_backend");
        *answer.lock().expect("nobody panics with it") = Some((status, text));
        Ok(is_tried)
    })
    .await?;
    let answer = answer.into_inner().expect("nobody panics with it");
    let (status, text) = answer.expect("it was asked at least once");
    let shown: String = text.chars().take(200).collect();
    let code = status.map_or(0, |status| status.as_u16());
    // An endless response is not read to its end.
    let is_late = status.is_none() && behaviour.starts_with("endless");
    ensure!(
        is_late || statuses.contains(&code) && text.contains(words),
        "{behaviour}: answered {code} {shown}"
    );
    context.count(format!("{behaviour} {code}"));
    Ok(())
}
