//! In a cluster of several builds, each replica's build can read every committed entry, every
//! snapshot that it restores and every message that it receives. For a replica that is down, the
//! build that it ran last counts.

use state::codec::{decode_envelope, format_of};

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I130";
/// Statement of the invariant.
pub const NAME: &str = "no entry, snapshot or message is of a format that a member does not know";

/// Checks every entry that was first applied while there were several builds, every restored
/// snapshot, and every unreadable message.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for (index, known) in &record.observation.formats {
        let entry = record.observation.log.get(index);
        let Some(command) = entry.and_then(|it| it.command.as_deref()) else {
            continue;
        };
        // Other invariants report entries that cannot be decoded.
        let Ok(envelope) = decode_envelope(command) else {
            continue;
        };
        subjects += 1;
        let format = format_of(&envelope.command);
        if format > *known {
            let detail = format!("entry {index} is of format {format}, a member knows {known}");
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    for (run, version, known) in &record.observation.snapshots {
        subjects += 1;
        if *version > u16::from(*known) {
            let detail =
                format!("{run} restored a snapshot of version {version}, it knows {known}");
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    if let Some((at_us, run, from)) = record.observation.unreadable.first() {
        let detail = format!("{run} could not read a message of {} at {at_us} us", from.0);
        return Err(super::violation(NUMBER, NAME, detail));
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use state::codec::FORMAT_VERSION;
    use state::command::{Command, Envelope, Lane, Origin};
    use state::ids::{ReplicaId, SessionId};
    use state::policy::PolicyConfig;

    use super::*;
    use crate::invariants::fixture::run;

    /// Returns the record of a cluster that set the newest policy, which takes [`FORMAT_VERSION`].
    /// Its oldest build knows format `known`.
    fn newest_policy(known: u8) -> RunRecord {
        let policy = PolicyConfig::defaults().pop().expect("there are policies");
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq: 2,
            },
            proposed_at_ms: 1,
            command: Command::PutPolicy(policy),
        };
        let bytes = state::codec::encode_envelope(&envelope);
        let mut record = RunRecord::default();
        let observation = &mut record.observation;
        observation.builds = [(ReplicaId(1), FORMAT_VERSION), (ReplicaId(2), known)].into();
        observation.applied(1, run(1, 1), 1, None, Some(0));
        observation.applied(2, run(1, 1), 2, Some(&bytes), Some(0));
        // Only the builds at the first application count.
        observation.builds.insert(ReplicaId(1), 0);
        observation.applied(3, run(2, 1), 2, Some(&bytes), Some(0));
        record
    }

    #[test]
    fn an_unreadable_entry_is_detected() {
        assert_eq!(check(&newest_policy(FORMAT_VERSION)), Ok(1));
        let broken = check(&newest_policy(1)).unwrap_err();
        assert_eq!(broken.detail, "entry 2 is of format 2, a member knows 1");
        assert_eq!(check(&RunRecord::default()), Ok(0));
    }

    #[test]
    fn an_unreadable_snapshot_is_detected() {
        let mut record = newest_policy(2);
        record.observation.snapshots = vec![(run(1, 1), 2, 2), (run(2, 1), 3, 2)];
        let broken = check(&record).unwrap_err();
        assert!(broken.detail.ends_with("version 3, it knows 2"), "{broken}");
    }

    #[test]
    fn an_unreadable_message_is_detected() {
        let mut record = newest_policy(2);
        let observation = &mut record.observation;
        observation.unreadable = vec![(5, run(2, 1), ReplicaId(1))];
        let broken = check(&record).unwrap_err();
        assert!(
            broken.detail.ends_with("a message of 1 at 5 us"),
            "{broken}"
        );
    }
}
