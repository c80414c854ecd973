//! Context-free checks of a peer's messages, independent of the sender.
//!
//! openraft trusts its peers. The messages rejected here would otherwise use up all terms, leave
//! holes in the log, or win every election with a log that no leader can have.

use prost::Message;

use crate::snapshot::HEAD_BYTES_MAX;
use crate::types::{Entry, LogId, SnapshotMeta, Vote};
use crate::wire::{MalformedMessageError, proto};

/// Maximum lead of a peer's term over this replica's term. It exceeds the number of elections that
/// a replica can miss, and is too small for any feasible number of calls to reach the last term.
const TERM_LEAP_MAX: u64 = 1_000_000;

/// Returns the greatest term to accept from a peer when `known` is the greatest one known.
pub(crate) fn term_max(known: u64) -> u64 {
    known.saturating_add(TERM_LEAP_MAX)
}

/// Rejects entries that no leader with this vote can send. `previous` is the entry before them, or
/// `None` if they begin the log. `committed` is the leader's last committed entry, if any.
pub(crate) fn check_entries(
    vote: Vote,
    previous: Option<LogId>,
    committed: Option<LogId>,
    entries: &[Entry],
) -> Result<(), MalformedMessageError> {
    let term = vote.leader_id.term;
    let is_later = |id: &LogId| id.leader_id.term > term;
    if previous.iter().chain(&committed).any(is_later) {
        return Err(MalformedMessageError(
            "a log with a later term than the leader's",
        ));
    }
    let mut before = previous;
    for entry in entries {
        let id = entry.log_id;
        let follows = match before {
            Some(before) => before.index.checked_add(1) == Some(id.index) && before < id,
            None => id.index == 0,
        };
        if !follows || is_later(&id) {
            return Err(MalformedMessageError(
                "entries that do not follow each other",
            ));
        }
        before = Some(id);
    }
    Ok(())
}

/// Reads the head of a snapshot offered under `vote`. Rejects one that no leader of that term can
/// offer, or that is too large to be read back from a file.
pub(crate) fn check_head(
    vote: Vote,
    head: &proto::SnapshotMeta,
) -> Result<SnapshotMeta, MalformedMessageError> {
    if head.encoded_len() > HEAD_BYTES_MAX {
        return Err(MalformedMessageError("a snapshot's head above the limit"));
    }
    let meta = SnapshotMeta::try_from(head.clone())?;
    let of_membership = *meta.last_membership.log_id();
    let is_later = |id: &LogId| id.leader_id.term > vote.leader_id.term;
    if meta.last_log_id.is_some_and(|id| is_later(&id)) || of_membership > meta.last_log_id {
        return Err(MalformedMessageError(
            "a snapshot with a later term than the leader's",
        ));
    }
    Ok(meta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Payload, log_id};

    fn id(term: u64, index: u64) -> LogId {
        log_id(term, 1, index)
    }

    fn entry(term: u64, index: u64) -> Entry {
        Entry {
            log_id: id(term, index),
            payload: Payload::Blank,
        }
    }

    #[test]
    fn entries_must_be_consecutive_and_within_the_leaders_term() {
        let vote = Vote::new_committed(5, 1);
        let check = |previous, committed, entries: &[Entry]| {
            check_entries(vote, previous, committed, entries)
        };
        let fine = [entry(3, 8), entry(5, 9)];
        assert_eq!(check(Some(id(3, 7)), Some(id(5, 90)), &fine), Ok(()));
        assert_eq!(check(None, None, &[entry(0, 0)]), Ok(()));
        assert_eq!(check(None, None, &[]), Ok(()));
        for (previous, committed, entries) in [
            (Some(id(6, 7)), None, vec![]),
            (None, Some(id(u64::MAX, 7)), vec![]),
            (Some(id(3, 7)), None, vec![entry(6, 8)]),
            (Some(id(3, 7)), None, vec![entry(3, 9)]),
            (Some(id(3, 7)), None, vec![entry(2, 8)]),
            (Some(id(3, u64::MAX)), None, vec![entry(3, 0)]),
            (None, None, vec![entry(3, 1)]),
        ] {
            assert!(check(previous, committed, &entries).is_err(), "{entries:?}");
        }
    }
}
