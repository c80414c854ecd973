//! Faults of an engine's KV events, injected with `--fault drop=0.1,restart-after=500`.

use std::str::FromStr;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::PublishedMessage;

/// Number of messages between two stalls.
const STALL_EVERY: u64 = 100;

/// Faults to inject into the messages of a publisher, drawn from a seed, so that runs repeat.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PublisherFaults {
    /// Share of messages that are dropped.
    drop: f64,
    /// Share of messages that are sent after the next one.
    reorder: f64,
    /// Share of messages that are sent twice.
    duplicate: f64,
    /// Interval in messages after which the engine restarts once idle, with an empty cache and
    /// sequence numbers from 0; `None` for never.
    restart_after: Option<u64>,
    /// Interval in messages after which the cache is reset once the engine is idle; `None` for
    /// never.
    clear_after: Option<u64>,
    /// Length of the pause that a subscriber's queue makes every [`STALL_EVERY`] messages; `None`
    /// for no pauses.
    stall: Option<Duration>,
    seed: u64,
    drawn: u64,
    /// Message that waits to be sent after the next one, if any.
    late: Option<PublishedMessage>,
}

impl PartialEq for PublishedMessage {
    fn eq(&self, other: &Self) -> bool {
        (self.seq, &self.payload) == (other.seq, &other.payload)
    }
}

/// Fault to inject into the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// No fault.
    Nothing,
    /// The engine restarts with an empty cache.
    Restart,
    /// The cache is reset.
    Clear,
}

impl FromStr for PublisherFaults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for fault in text.split(',') {
            let (name, value) = fault.split_once('=').unwrap_or((fault, ""));
            match name {
                "drop" => faults.drop = share(name, value)?,
                "reorder" => faults.reorder = share(name, value)?,
                "duplicate" => faults.duplicate = share(name, value)?,
                "restart-after" => faults.restart_after = Some(count(name, value)?),
                "clear-after" => faults.clear_after = Some(count(name, value)?),
                "stall" => faults.stall = Some(span(name, value)?),
                "seed" => faults.seed = value.parse().map_err(|_| wrong(name, "a number"))?,
                _ => {
                    return Err(format!(
                        "unknown fault {name:?}; known are drop, reorder, duplicate, \
                         restart-after, clear-after, stall and seed"
                    ));
                }
            }
        }
        Ok(faults)
    }
}

fn wrong(name: &str, expected: &str) -> String {
    format!("{name}: expected {expected}")
}

fn share(name: &str, value: &str) -> Result<f64, String> {
    let share = value.parse::<f64>().ok();
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or(wrong(name, "a share from 0 to 1"))
}

fn count(name: &str, value: &str) -> Result<u64, String> {
    let count = value.parse::<u64>().ok();
    count
        .filter(|count| *count > 0)
        .ok_or(wrong(name, "a number of messages"))
}

fn span(name: &str, value: &str) -> Result<Duration, String> {
    let span = humantime::parse_duration(value).ok();
    span.filter(|span| *span <= Duration::from_secs(60))
        .ok_or(wrong(name, "a time up to a minute, such as 500ms"))
}

impl PublisherFaults {
    /// Returns the messages to send in place of `message`.
    pub(super) fn send(&mut self, message: PublishedMessage) -> Vec<PublishedMessage> {
        let mut sent = Vec::new();
        if self.happens(self.reorder) && self.late.is_none() {
            self.late = Some(message);
            return sent;
        }
        if !self.happens(self.drop) {
            if self.happens(self.duplicate) {
                sent.push(message.clone());
            }
            sent.push(message);
        }
        sent.extend(self.late.take());
        sent
    }

    /// Returns the fault that is due after message number `published`.
    pub(super) fn fate(&self, published: u64) -> FaultKind {
        let is_due =
            |every: Option<u64>| every.is_some_and(|every| published.is_multiple_of(every));
        if is_due(self.restart_after) {
            FaultKind::Restart
        } else if is_due(self.clear_after) {
            FaultKind::Clear
        } else {
            FaultKind::Nothing
        }
    }

    /// Returns the length of the pause every [`STALL_EVERY`] messages; `None` for no pauses.
    pub(super) fn stall(&self) -> Option<Duration> {
        self.stall
    }

    /// Returns whether a subscriber's queue pauses before its message number `sent`.
    pub(super) fn stalls_at(sent: u64) -> bool {
        sent % STALL_EVERY == STALL_EVERY - 1
    }

    /// Drops a delayed message, because a new run starts.
    pub(super) fn forget(&mut self) {
        self.late = None;
    }

    fn happens(&mut self, share: f64) -> bool {
        if share <= 0.0 {
            return false;
        }
        self.drawn += 1;
        let draw = xxh3_64_with_seed(&self.drawn.to_le_bytes(), self.seed);
        // A float represents the upper 53 bits exactly.
        ((draw >> 11) as f64 / (1_u64 << 53) as f64) < share
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn sent(faults: &str) -> Vec<u64> {
        let mut faults: PublisherFaults = faults.parse().unwrap();
        (0..1000)
            .flat_map(|seq| {
                faults.send(PublishedMessage {
                    seq,
                    payload: Bytes::new(),
                })
            })
            .map(|message| message.seq)
            .collect()
    }

    #[test]
    fn faults_occur_at_their_rate_and_by_the_seed() {
        assert_eq!(sent("seed=1"), (0..1000).collect::<Vec<_>>());
        let dropped = 1000 - sent("drop=0.2").len();
        assert!((150..250).contains(&dropped), "{dropped}");
        let doubled = sent("duplicate=0.2").len() - 1000;
        assert!((150..250).contains(&doubled), "{doubled}");
        let reordered = sent("reorder=0.2");
        assert!(!reordered.is_sorted() && reordered.len() >= 999);
        assert_eq!(sent("drop=0.5,seed=3"), sent("drop=0.5,seed=3"));
        assert_ne!(sent("drop=0.5,seed=3"), sent("drop=0.5,seed=4"));
    }

    #[test]
    fn an_engine_restarts_and_clears_on_request() {
        let faults: PublisherFaults = "restart-after=10,clear-after=4".parse().unwrap();
        let fates: Vec<FaultKind> = [3, 4, 10, 11, 20].map(|at| faults.fate(at)).to_vec();
        use FaultKind::{Clear, Nothing, Restart};
        assert_eq!(fates, [Nothing, Clear, Restart, Nothing, Restart]);
    }

    #[test]
    fn unknown_faults_are_refused() {
        for text in [
            "",
            "drop",
            "drop=2",
            "restart-after=0",
            "stall=2h",
            "explode=1",
            "seed=x",
        ] {
            assert!(text.parse::<PublisherFaults>().is_err(), "{text}");
        }
    }
}
