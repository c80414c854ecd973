//! Tests that a waiter for a charge is notified when the envelope with the charge is committed.

use state::command::{BatchReply, Charge, Committed, Rejection, Reply};
use state::ids::LogIndex;

use super::{cut, outbox, user};
use crate::ports::ProposeError;
use crate::routing::outbox::{ChargeCommit, Outbox, OutboxSettings};

fn charge(outbox: &mut Outbox, name: &str) {
    outbox.charge(Charge {
        user: user(name),
        output: 1,
        ..Charge::default()
    });
}

fn answered(outbox: &mut Outbox, reply: Reply) {
    let index = LogIndex(1);
    outbox.handle_outcome(Ok(Committed { index, reply }));
}

fn is_waiting(commit: &mut ChargeCommit) -> bool {
    use tokio::sync::oneshot::error::TryRecvError;
    commit.try_recv() == Err(TryRecvError::Empty)
}

#[test]
fn a_charge_is_confirmed_by_its_own_envelope() {
    let mut outbox = outbox(OutboxSettings::default());
    assert!(outbox.commit_of(user("ada")).is_none(), "nothing is owed");
    charge(&mut outbox, "ada");
    cut(&mut outbox);
    let mut outstanding = outbox.commit_of(user("ada")).expect("it is on its way");
    charge(&mut outbox, "ada");
    charge(&mut outbox, "bob");
    let mut queued = outbox.commit_of(user("ada")).expect("it is queued");
    outbox.handle_outcome(Err(ProposeError::Unknown("no answer".to_owned())));
    assert!(is_waiting(&mut outstanding), "its fate is not known");

    answered(&mut outbox, Reply::Batch(BatchReply::default()));
    assert!(outstanding.try_recv().is_ok());
    assert!(is_waiting(&mut queued), "another envelope");
    cut(&mut outbox);
    answered(&mut outbox, Reply::Batch(BatchReply::default()));
    assert!(queued.try_recv().is_ok());
    assert!(outbox.commit_of(user("ada")).is_none());
}

#[test]
fn a_permanently_refused_charge_is_not_confirmed() {
    let mut outbox = outbox(OutboxSettings::default());
    charge(&mut outbox, "ada");
    let mut commit = outbox.commit_of(user("ada")).expect("it is queued");
    cut(&mut outbox);
    answered(&mut outbox, Reply::Rejected(Rejection::TooManyUsers));
    assert!(!is_waiting(&mut commit) && commit.try_recv().is_err());
}
