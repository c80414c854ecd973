//! Golden bytes of what format version 6 introduced.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::budgets::Budget;
use crate::command::{Lane, UserChanges};
use crate::ids::{ApiKeyId, RestoreId};

#[track_caller]
fn written(command: Command) -> String {
    let envelope = envelope(Lane::Admin, command);
    let bytes = encode_envelope(&envelope);
    assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    hex(&bytes)
}

#[test]
fn version_6_commands_encode_to_golden_bytes() {
    let id = ApiKeyId(0xabcd);
    expect!["0603fdefcdab896745230101fb2c01fd0068e5cf8b01000019cdab000000000000"]
        .assert_eq(&written(Command::EndKey { id }));
    let restore = RestoreId(5);
    expect!["0a03fdefcdab896745230101fb2c01fd0068e5cf8b0100001a0501"].assert_eq(&written(
        Command::BeginRestoreOfKeys {
            restore,
            force: true,
        },
    ));
    let changes = UserChanges {
        name: "ada".to_owned(),
        weight_milli: Some(2000),
        limits: None,
        budget: Some(Budget {
            day: Some(1000),
            month: None,
        }),
        models: Some(vec!["m*".to_owned()]),
    };
    expect![
        "0603fdefcdab896745230101fb2c01fd0068e5cf8b0100001b0361646101fbd007000101fbe803000101026d2a"
    ]
    .assert_eq(&written(Command::ConfigureUser(Box::new(changes))));
}
