//! Waits for conditions of a cluster.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{interval, timeout};

/// Timeout of waits, after which a test of a broken cluster fails.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two checks of a condition.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Waits until `condition` holds. `what` describes it in the error.
///
/// # Errors
/// If the condition fails, or does not hold within a minute.
pub async fn until(
    what: &str,
    condition: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    until_within(PATIENCE, what, condition).await
}

/// Waits until `condition` holds, for at most `limit`.
///
/// # Errors
/// If the condition fails, or does not hold in time.
pub async fn until_within(
    limit: Duration,
    what: &str,
    condition: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let met = async {
        let mut looks = interval(LOOK_EVERY);
        while !condition().await? {
            looks.tick().await;
        }
        anyhow::Ok(())
    };
    timeout(limit, met)
        .await
        .with_context(|| format!("{what}: not within {} s", limit.as_secs()))
        .flatten()
        .with_context(|| what.to_owned())
}
