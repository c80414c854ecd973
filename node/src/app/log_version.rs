//! Versions of the log format and of messages that the members know, and which commands may be
//! proposed.
//!
//! A replica stops at a command that it cannot decode. Each replica therefore announces the newest
//! format it knows as a label of its membership, and updates it when started with another build. A
//! command that not every build knows is proposed only once all members have announced its format.
//! A member that is down counts with its last announcement, because it would stop when it returns.
//! The same holds for messages, under another label, except that a replica only drops those that it
//! cannot decode. Announcements may be slightly outdated, so do not downgrade a replica while such
//! commands are being proposed.

use std::sync::Arc;
use std::time::Duration;

use api::routing::Dispatcher;
use raft::{Member, Replica, Status};
use state::codec::{FORMAT_VERSION, FORMAT_VERSION_COMMON, format_of};
use state::command::Command;
use tokio_util::sync::CancellationToken;

use super::intervals::every;
use crate::planted::{self, Bug};

/// Interval at which the members' log formats are checked.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);
/// Log format that added the outcomes of predictions.
const PREDICTION_OUTCOMES_SINCE_FORMAT: u8 = 10;
/// Name of the member label with the newest known log format.
const LABEL: &str = "format";
/// Version of the messages between replicas that contain shares. Builds that know log format
/// [`SHARES_SINCE_FORMAT`] can read it.
pub(super) const VERSION_SHARES: u8 = 3;
/// Version of the messages that contain figures, the newest one that this build reads.
pub(super) const VERSION_FIGURES: u8 = 4;
/// Log format whose builds are the first to read messages with shares.
pub(super) const SHARES_SINCE_FORMAT: u8 = 4;
/// Name of the member label with the newest readable version of messages.
const MESSAGES_LABEL: &str = "messages";

/// Returns the newest message version that a build with log format `format` announces; simulations
/// pass an earlier format to imitate an earlier build. Some earlier builds know this build's format
/// but not its messages, and announce no version.
pub(super) fn messages_known(format: u8) -> u8 {
    match format {
        FORMAT_VERSION.. => VERSION_FIGURES,
        SHARES_SINCE_FORMAT.. => VERSION_SHARES,
        _ => VERSION_SHARES - 1,
    }
}

/// Returns the member labels of a build whose newest known log format is `own`.
pub(super) fn labels(own: u8) -> [(String, String); 2] {
    let label = |name: &str, known: u8| (name.to_owned(), known.to_string());
    [
        label(LABEL, own),
        label(MESSAGES_LABEL, messages_known(own)),
    ]
}

/// Whether all members have announced that they can read messages of `version`. Only valid from
/// [`VERSION_FIGURES`] on: builds without the label cannot read those.
pub(super) fn all_know_messages(status: &Status, version: u8) -> bool {
    let told = |member: &Member| member.labels.get(MESSAGES_LABEL)?.parse::<u8>().ok();
    let mut members = status.members.values();
    planted::is(Bug::MessageSentEarly)
        || members.all(|member| told(member).is_some_and(|known| known >= version))
}

/// Returns an error that lists the other members that cannot decode `command`, if any. `status`
/// returns the status of this replica.
pub(super) fn check(command: &Command, status: &dyn Fn() -> Status) -> Result<(), String> {
    let needed = format_of(command);
    if needed <= FORMAT_VERSION_COMMON || planted::is(Bug::FormatSentEarly) {
        return Ok(());
    }
    let status = status();
    let others = status.members.iter().filter(|(id, _)| **id != status.id);
    let lacking: Vec<String> = others
        .filter(|(_, member)| known(member) < needed)
        .map(|(id, _)| id.to_string())
        .collect();
    if lacking.is_empty() {
        return Ok(());
    }
    Err(format!(
        "replicas of an earlier build could not read it: log format {needed} is not known to {}",
        lacking.join(", ")
    ))
}

/// Whether all members have announced that they know log format `format`.
pub(super) fn all_know(status: &Status, format: u8) -> bool {
    status
        .members
        .values()
        .all(|member| known(member) >= format)
}

/// Makes `dispatcher` report the outcomes of predictions once all members can decode them. Sent
/// earlier, one unreadable item would hold back its whole batch. Ends at `stop`.
pub(super) async fn follow(replica: Replica, dispatcher: Arc<Dispatcher>, stop: CancellationToken) {
    let mut ticks = every(FOLLOW_EVERY);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let status = replica.status();
        let is_known =
            !status.members.is_empty() && all_know(&status, PREDICTION_OUTCOMES_SINCE_FORMAT);
        dispatcher.set_reports_prediction_outcomes(is_known);
    }
}

/// Returns the newest log format that a member has announced.
fn known(member: &Member) -> u8 {
    let told = member.labels.get(LABEL).and_then(|it| it.parse().ok());
    told.unwrap_or(FORMAT_VERSION_COMMON)
}

#[cfg(test)]
mod tests {
    use raft::Role;
    use state::ids::RestoreId;

    use super::*;

    fn status(id: u8, formats: &[Option<u8>]) -> Status {
        let member = |format: &Option<u8>| Member {
            address: String::new(),
            labels: format
                .map(|it| (LABEL.to_owned(), it.to_string()))
                .into_iter()
                .collect(),
            is_voter: true,
            is_connected: true,
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
        let restore = RestoreId(1);
        let newer = Command::AbortRestore { restore };
        let asked = |own: u8, formats: &[Option<u8>]| check(&newer, &|| status(own, formats));
        assert_eq!(asked(1, &[Some(3), Some(3), Some(4)]), Ok(()));
        assert_eq!(asked(1, &[None, Some(3)]), Ok(()), "this build knows it");
        assert_eq!(asked(1, &[]), Ok(()));
        let lacking = asked(1, &[Some(3), None, Some(2), Some(3)]).unwrap_err();
        assert!(
            lacking.ends_with("log format 3 is not known to 2, 3"),
            "{lacking}"
        );
    }

    #[test]
    fn figures_wait_until_all_members_can_read_them() {
        let mut status = status(1, &[Some(9), Some(10)]);
        let known = |status: &Status| all_know_messages(status, VERSION_FIGURES);
        assert!(!known(&status));
        let mut members = status.members.values_mut();
        let mut tells = |version: &str| {
            let member = members.next().unwrap();
            let label = MESSAGES_LABEL.to_owned();
            member.labels.insert(label, version.to_owned());
        };
        tells("4");
        tells("5");
        assert!(known(&status));
        let first = status.members.values_mut().next().unwrap();
        first
            .labels
            .insert(MESSAGES_LABEL.to_owned(), "3".to_owned());
        assert!(!known(&status));
    }

    #[test]
    fn a_restore_waits_until_all_members_can_read_the_backup() {
        let restore = RestoreId(1);
        let begin = Command::BeginRestore {
            restore,
            force: true,
        };
        let asked = |formats: &[Option<u8>]| check(&begin, &|| status(1, formats));
        assert_eq!(asked(&[None, Some(FORMAT_VERSION)]), Ok(()));
        assert!(asked(&[None, Some(FORMAT_VERSION - 1)]).is_err());
    }

    #[test]
    fn common_commands_wait_for_no_member() {
        let command = Command::AssignReaders(Vec::new());
        assert_eq!(check(&command, &|| unreachable!("nobody is asked")), Ok(()));
        let told = |name: &str, known: u8| (name.to_owned(), known.to_string());
        let both = [
            told("format", FORMAT_VERSION),
            told("messages", VERSION_FIGURES),
        ];
        assert_eq!(labels(FORMAT_VERSION), both);
        let both = [told("format", 5), told("messages", VERSION_SHARES)];
        assert_eq!(labels(5), both);
    }
}
