//! Golden bytes of what format version 10 introduced for ranks.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::command::Lane;
use crate::ids::{BackendRef, Incarnation, Slot};

#[test]
fn set_ranks_encodes_to_golden_bytes() {
    let command = Command::SetRanks {
        backend: BackendRef {
            slot: Slot(3),
            incarnation: Incarnation(2),
        },
        ranks: 4,
    };
    assert_eq!(format_of(&command), 10);
    let envelope = envelope(Lane::Admin, command);
    let bytes = encode_envelope(&envelope);
    assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    expect!["0a03fdefcdab896745230101fb2c01fd0068e5cf8b0100001f030204"].assert_eq(&hex(&bytes));
}
