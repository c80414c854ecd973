//! Tests that a waiter for a charge is notified when the envelope with the charge is committed.

use state::command::{BatchReply, Charge, Committed, Rejection, Reply};
use state::ids::{LogIndex, StreamCarrier, StreamId};
use state::streams::CarriedStream;

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
    assert!(
        outbox.commit_of(user("ada"), None).is_none(),
        "nothing is owed"
    );
    charge(&mut outbox, "ada");
    cut(&mut outbox);
    let mut outstanding = outbox
        .commit_of(user("ada"), None)
        .expect("it is on its way");
    charge(&mut outbox, "ada");
    charge(&mut outbox, "bob");
    let mut queued = outbox.commit_of(user("ada"), None).expect("it is queued");
    outbox.handle_outcome(Err(ProposeError::Unknown("no answer".to_owned())));
    assert!(is_waiting(&mut outstanding), "its fate is not known");

    answered(&mut outbox, Reply::Batch(BatchReply::default()));
    assert!(outstanding.try_recv().is_ok());
    assert!(is_waiting(&mut queued), "another envelope");
    cut(&mut outbox);
    answered(&mut outbox, Reply::Batch(BatchReply::default()));
    assert!(queued.try_recv().is_ok());
    assert!(outbox.commit_of(user("ada"), None).is_none());
}

#[test]
fn a_permanently_refused_charge_is_not_confirmed() {
    let mut outbox = outbox(OutboxSettings::default());
    charge(&mut outbox, "ada");
    let mut commit = outbox.commit_of(user("ada"), None).expect("it is queued");
    cut(&mut outbox);
    answered(&mut outbox, Reply::Rejected(Rejection::TooManyUsers));
    assert!(!is_waiting(&mut commit) && commit.try_recv().is_err());
}

#[test]
fn waiters_for_a_stream_wait_for_no_other_charge_of_its_user() {
    let mut outbox = outbox(OutboxSettings::default());
    let ada = user("ada");
    charge(&mut outbox, "ada");
    let carried = |stream| CarriedStream {
        stream: StreamId(stream),
        carrier: StreamCarrier(7),
    };
    let streams = 1_000;
    for stream in 0..streams {
        for _ in 0..2 {
            let charge = Charge {
                user: ada,
                output: 1,
                ..Charge::default()
            };
            outbox.charge_for(Some(carried(stream)), charge);
        }
        outbox.take_over(ada, carried(stream), 1);
    }
    assert_eq!(outbox.unapplied(ada).output, 2 * streams + 1);
    let charged = [None, Some(carried(0)), Some(carried(streams - 1))];
    let mut waiting = charged.map(|it| outbox.commit_of(ada, it).expect("it is queued"));
    let mut sent = 0;
    while !outbox.is_empty() {
        assert!(is_waiting(&mut waiting[2]), "it is queued");
        sent += cut(&mut outbox).len();
        assert_eq!(outbox.unapplied(ada).output, 2 * streams + 1);
        answered(&mut outbox, Reply::Batch(BatchReply::default()));
        let [others, first, _] = &mut waiting;
        assert!(!is_waiting(others) && !is_waiting(first), "both went first");
        // More is owed again and again.
        charge(&mut outbox, "bob");
        if sent as u64 > streams {
            break;
        }
    }
    assert!(waiting[2].try_recv().is_ok());
}
