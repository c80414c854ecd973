//! Log formats that the members know, and which commands may be proposed.
//!
//! A replica stops at a command that it cannot decode. Each replica therefore announces the newest
//! format it knows as a label of its membership, and updates it when started with another build. A
//! command that not every build knows is proposed only once all members have announced its format.
//! A member that is down counts with its last announcement, because it would stop when it returns.
//! Announcements may be slightly outdated, so do not downgrade a replica while such commands are
//! being proposed.

use raft::{Member, Status};
use state::codec::FORMAT_VERSION_FIRST;

use crate::planted::{self, Bug};

/// Name of the member label with the newest known log format.
const LABEL: &str = "format";

/// Returns the member label of a build whose newest known log format is `own`.
pub(super) fn label(own: u8) -> (String, String) {
    (LABEL.to_owned(), own.to_string())
}

/// Returns an error that lists the members that cannot decode commands of format `needed`, if any.
/// `own` is the newest format that this replica knows, and `status` returns its status.
pub(super) fn check(needed: u8, own: u8, status: &dyn Fn() -> Status) -> Result<(), String> {
    if needed <= FORMAT_VERSION_FIRST || planted::is(Bug::FormatSentEarly) {
        return Ok(());
    }
    let status = status();
    let is_lacking = |(id, member): &(&u8, &Member)| match **id == status.id {
        true => own < needed,
        false => known(member) < needed,
    };
    let lacking = status.members.iter().filter(is_lacking);
    let lacking: Vec<String> = lacking.map(|(id, _)| id.to_string()).collect();
    if lacking.is_empty() && own >= needed {
        return Ok(());
    }
    Err(format!(
        "replicas of an earlier build could not read it: log format {needed} is not known to {}",
        lacking.join(", ")
    ))
}

/// Returns the newest log format that a member has announced.
fn known(member: &Member) -> u8 {
    let told = member.labels.get(LABEL).and_then(|it| it.parse().ok());
    told.unwrap_or(FORMAT_VERSION_FIRST)
}

#[cfg(test)]
mod tests {
    use raft::Role;

    use super::*;

    fn status(id: u8, formats: &[Option<u8>]) -> Status {
        let member = |format: &Option<u8>| Member {
            address: String::new(),
            labels: format.map(label).into_iter().collect(),
            is_voter: true,
            is_connected: true,
            silent_since: None,
            is_refusing: false,
            lag: None,
        };
        Status {
            id,
            cluster_id: None,
            role: Role::Leader,
            term: 1,
            leader: Some(id),
            has_quorum: true,
            committed: 1,
            applied: 1,
            last_log: 1,
            snapshot: None,
            purged: 1,
            caught_up: true,
            is_removed: false,
            fault: None,
            unjoined: None,
            peers: Vec::new(),
            waiting: None,
            members: (1..).zip(formats.iter().map(member)).collect(),
        }
    }

    #[test]
    fn a_command_waits_until_all_members_know_its_format() {
        let asked = |own: u8, formats: &[Option<u8>]| check(3, own, &|| status(1, formats));
        assert_eq!(asked(3, &[Some(3), Some(3), Some(4)]), Ok(()));
        assert_eq!(asked(3, &[None, Some(3)]), Ok(()), "this build knows it");
        assert_eq!(asked(3, &[]), Ok(()));
        let lacking = asked(3, &[Some(3), None, Some(2), Some(3)]).unwrap_err();
        assert!(
            lacking.ends_with("log format 3 is not known to 2, 3"),
            "{lacking}"
        );
        let lacking = asked(2, &[Some(2), Some(3)]).unwrap_err();
        assert!(lacking.ends_with("is not known to 1"), "{lacking}");
    }

    #[test]
    fn a_command_of_the_first_format_waits_for_no_member() {
        let status = || unreachable!("the members do not matter");
        assert_eq!(check(FORMAT_VERSION_FIRST, 1, &status), Ok(()));
    }
}
