//! Checks of a cluster after a fault, from outside. While the load rests, every running replica
//! must be ready, nothing may be in flight, and all digests must agree. Counters must equal the
//! engines' usage, and replicas must know what the last requests put into caches.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::access::key;
use super::client_ledger::{AnsweredRequest, UserTotals};
use super::load::{RunningLoad, charged, used};
use super::{ProcessCluster, until};

/// Number of recent prompts that are queried at every replica.
const RECALLED: usize = 6;
/// Time for which counters must stay unchanged to be final.
const SETTLED: Duration = Duration::from_millis(300);

/// Pauses the load, checks everything, and then resumes the load.
///
/// # Errors
/// Describes the first check that fails.
pub async fn check(cluster: &ProcessCluster, load: &RunningLoad) -> anyhow::Result<()> {
    load.rest().await?;
    for number in cluster.up() {
        cluster.wait_ready(number).await?;
    }
    cluster.wait_idle().await?;
    cluster.check_digests().await?;
    check_counters(cluster, load).await.context("counters")?;
    check_ownership(cluster).await.context("ownership")?;
    check_knowledge(cluster, load).await.context("knowledge")?;
    check_failures(load)?;
    load.go_on();
    Ok(())
}

/// Checks that no request failed on a running replica.
///
/// # Errors
/// Describes the failed requests.
pub fn check_failures(load: &RunningLoad) -> anyhow::Result<()> {
    let book = load.ledger();
    ensure!(
        book.failed == 0,
        "{} requests failed on replicas that were up: {:#?}",
        book.failed,
        book.failures
    );
    Ok(())
}

/// Checks that every user was charged for the usage that engines reported. Waits for the last
/// charges, which may take a moment.
async fn check_counters(cluster: &ProcessCluster, load: &RunningLoad) -> anyhow::Result<()> {
    for number in cluster.up() {
        let last = RefCell::new(None);
        let fits = until("counters are what the engines told", async || {
            let charged = charged(cluster, number).await?;
            let compared = load.ledger().compare(&charged);
            let fits = compared.is_ok();
            last.replace(compared.err());
            Ok(fits)
        });
        if let Err(error) = fits.await {
            let why = last.take().map(|why| why.to_string()).unwrap_or_default();
            return Err(error.context(format!("replica {}: {why}", number + 1)));
        }
    }
    let settled = settled_counters(cluster).await?;
    load.ledger().compare(&settled)?;
    check_usage(cluster).await?;
    load.ledger().begin_account(settled);
    Ok(())
}

/// Checks at every running replica that the usage by day, key and model adds up to the users'
/// counters. Both must be at rest.
///
/// # Errors
/// Describes the first difference.
pub async fn check_usage(cluster: &ProcessCluster) -> anyhow::Result<()> {
    let none = UserTotals::default();
    for number in cluster.up() {
        let mut charged = charged(cluster, number).await?;
        charged.retain(|_, totals| *totals != none);
        let used = used(cluster, number).await?;
        ensure!(
            used == charged,
            "replica {}: usage adds up to {used:?}, users were charged {charged:?}",
            number + 1
        );
    }
    Ok(())
}

/// Returns the users' counters once they have stayed unchanged for [`SETTLED`]. Bounds alone would
/// accept counters that still grow.
async fn settled_counters(
    cluster: &ProcessCluster,
) -> anyhow::Result<BTreeMap<String, UserTotals>> {
    let first = *cluster.up().first().context("no replica is up")?;
    let last = RefCell::new(charged(cluster, first).await?);
    let since = Cell::new(Instant::now());
    until("counters are settled", async || {
        let now = charged(cluster, first).await?;
        if *last.borrow() != now {
            last.replace(now);
            since.set(Instant::now());
        }
        Ok(since.get().elapsed() >= SETTLED)
    })
    .await?;
    Ok(last.into_inner())
}

/// Checks that no replica believes an engine to hold more blocks than its capacity.
async fn check_ownership(cluster: &ProcessCluster) -> anyhow::Result<()> {
    for number in cluster.up() {
        let ownership = cluster.get(number, "/admin/v1/ownership").await?;
        let backends = ownership["backends"].as_array().context("no backends")?;
        for backend in backends {
            let owned = backend["owned_blocks"].as_u64().context("no count")?;
            let capacity = backend["capacity_blocks"].as_u64().unwrap_or(u64::MAX);
            ensure!(
                owned <= capacity,
                "replica {}: {backend} owns more than it can hold",
                number + 1
            );
        }
    }
    Ok(())
}

/// Checks that every replica knows which engines hold the prompts that were answered last.
async fn check_knowledge(cluster: &ProcessCluster, load: &RunningLoad) -> anyhow::Result<()> {
    check_recalled(cluster, &load.recent(RECALLED)).await
}

/// Checks that every replica knows that the responding engines hold these prompts.
///
/// # Errors
/// If a replica does not know it.
pub async fn check_recalled(
    cluster: &ProcessCluster,
    answers: &[AnsweredRequest],
) -> anyhow::Result<()> {
    for answered in answers {
        let engine = answered.answer.backend.as_deref().context("no backend")?;
        let body: Value = serde_json::from_slice(&answered.body)?;
        let bearer = format!("Bearer {}", key(&answered.user));
        let headers = match cluster.access().is_secure() {
            true => json!({ "authorization": bearer }),
            false => json!({}),
        };
        let asked = json!({ "path": "/v1/chat/completions", "headers": headers, "body": body });
        for number in cluster.up() {
            let explained = cluster
                .send(number, Method::POST, "/admin/v1/explain", Some(&asked))
                .await?;
            let all = explained["blocks_matchable"]
                .as_u64()
                .context("no blocks")?;
            let backends = explained["backends"].as_array().context("no backends")?;
            let named = backends.iter().find(|backend| backend["id"] == engine);
            let matched = named.and_then(|backend| backend["matched_applied"].as_u64());
            ensure!(
                matched == Some(all),
                "replica {} believes {matched:?} of {all} blocks to be in {engine}, where replica {} \
                 sent them {:?} ago: {explained:#}",
                number + 1,
                answered.replica + 1,
                answered.sent.elapsed(),
            );
        }
    }
    Ok(())
}
