//! Golden bytes of what format version 10 introduced.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::command::{BackendSpec, Lane, Rejection};
use crate::discovery::{Discovery, DiscoveryChange};
use crate::ids::{AttemptId, BackendRef, Incarnation, Slot};
use crate::service::BeliefSample;

#[test]
fn prediction_outcomes_encode_to_golden_bytes() {
    let items = vec![Item::ObserveBelief(BeliefSample {
        backend: BackendRef {
            slot: Slot(3),
            incarnation: Incarnation(2),
        },
        held: 40,
        lost: 3,
        found: 1,
        computed_blocks: 300,
    })];
    let base_attempt = AttemptId(7);
    let command = Command::Batch {
        base_attempt,
        items,
    };
    assert_eq!(format_of(&command), 10);
    let envelope = envelope(Lane::Outbox, command);
    let bytes = encode_envelope(&envelope);
    assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    expect!["0a03fdefcdab896745230100fb2c01fd0068e5cf8b0100000107012f0302280301ac02"]
        .assert_eq(&hex(&bytes));
}

fn written(change: DiscoveryChange) -> String {
    let discovery = Discovery {
        source: "pods".to_owned(),
        change,
    };
    let envelope = envelope(Lane::Admin, Command::Discover(Box::new(discovery)));
    assert_eq!(format_of(&envelope.command), 10);
    let bytes = encode_envelope(&envelope);
    assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    hex(&bytes)
}

#[test]
fn discovery_changes_encode_to_golden_bytes() {
    let name = || "pods-a".to_owned();
    let spec = BackendSpec {
        id: name(),
        url: "http://a:1".to_owned(),
        models: vec!["*".to_owned()],
        labels: [("zone".to_owned(), "x".to_owned())].into(),
        capacity_blocks: None,
        kv_events: None,
        kv_replay: None,
        role: BackendRole::Both,
    };
    expect!["0a03fdefcdab896745230101fb2c01fd0068e5cf8b0100002004706f64730006706f64732d610a687474703a2f2f613a3101012a01047a6f6e650178000000"].assert_eq(&written(DiscoveryChange::Found(spec)));
    expect!["0a03fdefcdab896745230101fb2c01fd0068e5cf8b0100002004706f64730106706f64732d61"]
        .assert_eq(&written(DiscoveryChange::Lost { name: name() }));
    expect!["0a03fdefcdab896745230101fb2c01fd0068e5cf8b0100002004706f64730206706f64732d61"]
        .assert_eq(&written(DiscoveryChange::Forgotten { name: name() }));
}

#[test]
fn not_of_source_rejection_encodes_to_golden_bytes() {
    let reply = Reply::Rejected(Rejection::NotOfSource {
        name: "a".to_owned(),
    });
    let bytes = encode_reply(&reply);
    expect!["02030c0161"].assert_eq(&hex(&bytes));
    assert_eq!(decode_reply(&bytes).unwrap(), reply);
}
