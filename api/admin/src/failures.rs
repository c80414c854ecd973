//! Counts wrong tokens per source, in bounded memory, to slow down a source that sends many.
//!
//! Each source has a bucket of attempts; beyond [`SOURCES_MAX`] sources, all others share one. Only
//! wrong tokens consume attempts, so holders of correct ones are unaffected, unless someone who
//! shares their bucket guesses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Number of wrong tokens that a source may send in a burst.
const TRIES_MAX: u32 = 10;
/// Time after which a source may send one more wrong token.
const REFILL: Duration = Duration::from_secs(1);
/// Maximum number of sources tracked separately; all others count as one.
const SOURCES_MAX: usize = 4096;

/// Token buckets of the sources that recently sent wrong tokens.
#[derive(Debug, Default)]
pub(super) struct FailedTries(Mutex<SourceTable>);

#[derive(Debug, Default)]
struct SourceTable {
    /// Time at which the bucket of each tracked source is full again.
    full_at: BTreeMap<IpAddr, Instant>,
    /// Time at which the bucket shared by all other sources is full again; `None` if it was never
    /// used.
    others_full_at: Option<Instant>,
}

impl FailedTries {
    /// Checks whether `source` may present a token.
    ///
    /// # Errors
    /// Returns the time that it has to wait.
    pub(super) fn may_try(&self, source: IpAddr) -> Result<(), Duration> {
        let (table, now) = (self.table(), Instant::now());
        let full_at = match table.full_at.get(&source) {
            Some(full_at) => Some(*full_at),
            None if table.is_full() => table.others_full_at,
            None => None,
        };
        let missing = full_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        match missing.checked_sub(REFILL * (TRIES_MAX - 1)) {
            Some(wait) if !wait.is_zero() => Err(wait),
            _ => Ok(()),
        }
    }

    /// Records a wrong token from `source`.
    pub(super) fn failed(&self, source: IpAddr) {
        let (mut table, now) = (self.table(), Instant::now());
        if !table.full_at.contains_key(&source) && table.is_full() {
            table.full_at.retain(|_, full_at| *full_at > now);
        }
        let later = |full_at: Option<Instant>| full_at.map_or(now, |at| at.max(now)) + REFILL;
        if table.full_at.contains_key(&source) || !table.is_full() {
            let full_at = later(table.full_at.get(&source).copied());
            table.full_at.insert(source, full_at);
        } else {
            table.others_full_at = Some(later(table.others_full_at));
        }
    }

    fn table(&self) -> MutexGuard<'_, SourceTable> {
        // Every change leaves the table consistent, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SourceTable {
    fn is_full(&self) -> bool {
        self.full_at.len() >= SOURCES_MAX
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(number: u32) -> IpAddr {
        Ipv4Addr::from(number).into()
    }

    #[tokio::test(start_paused = true)]
    async fn failed_logins_slow_only_their_source() {
        let tries = FailedTries::default();
        for _ in 0..TRIES_MAX {
            assert_eq!(tries.may_try(source(1)), Ok(()));
            tries.failed(source(1));
        }
        assert_eq!(tries.may_try(source(1)), Err(REFILL));
        assert_eq!(tries.may_try(source(2)), Ok(()));
        tokio::time::advance(REFILL).await;
        assert_eq!(tries.may_try(source(1)), Ok(()));
        tries.failed(source(1));
        assert_eq!(tries.may_try(source(1)), Err(REFILL));
        tokio::time::advance(REFILL * TRIES_MAX).await;
        for _ in 0..TRIES_MAX {
            assert_eq!(tries.may_try(source(1)), Ok(()));
            tries.failed(source(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_failing_sources_take_bounded_memory() {
        let tries = FailedTries::default();
        let all = u32::try_from(SOURCES_MAX).unwrap() + TRIES_MAX;
        for number in 0..all {
            tries.failed(source(number));
        }
        assert_eq!(tries.table().full_at.len(), SOURCES_MAX);
        assert!(tries.may_try(source(all)).is_err(), "who has no place");
        assert_eq!(tries.may_try(source(0)), Ok(()));
        tokio::time::advance(REFILL * TRIES_MAX).await;
        tries.failed(source(all));
        assert_eq!(tries.table().full_at.len(), 1);
        assert_eq!(tries.may_try(source(all)), Ok(()));
    }
}
