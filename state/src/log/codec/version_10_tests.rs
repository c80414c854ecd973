//! Golden bytes of what format version 10 introduced.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::command::Lane;
use crate::ids::{AttemptId, BackendRef, Incarnation, Slot};
use crate::service::BeliefSample;

#[test]
fn beliefs_have_their_bytes() {
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
    expect!["0a03fdefcdab896745230100fb2c01fd0068e5cf8b010000010701470302280301ac02"]
        .assert_eq(&hex(&bytes));
}
