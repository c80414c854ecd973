//! Golden bytes of what format version 8 introduced.

use expect_test::expect;

use super::tests::{envelope, hex};
use super::*;
use crate::budgets::Budget;
use crate::caches::CacheScope;
use crate::command::{BackendSpec, Founding, Lane, UserDefaults};
use crate::policy::{PolicyConfig, RoutingSettings};
use crate::prefix::HashSecret;
use crate::pricing::FairnessSettings;
use crate::settings::{AdmissionSettings, UserLimits};

fn defaults() -> Box<UserDefaults> {
    Box::new(UserDefaults {
        weight_milli: 500,
        limits: UserLimits {
            concurrent: Some(4),
            ..UserLimits::default()
        },
        budget: Budget {
            day: Some(1000),
            month: None,
        },
        cache: CacheScope::Group("team".to_owned()),
    })
}

fn written(command: Command) -> String {
    let envelope = envelope(Lane::Admin, command);
    let bytes = encode_envelope(&envelope);
    assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    hex(&bytes)
}

#[test]
fn version_8_commands_encode_to_golden_bytes() {
    expect![
        "0803fdefcdab896745230101fb2c01fd0068e5cf8b0100001dfbf401000001040001fbe8030002047465616d"
    ]
    .assert_eq(&written(Command::PutUserDefaults(defaults())));
    let founding = Founding {
        hash_seed: 42,
        hash_secret: HashSecret::of_number(42),
        policy: PolicyConfig::LeastRequest,
        fairness: FairnessSettings::default(),
        routing: RoutingSettings::default(),
        admission: AdmissionSettings::default(),
    };
    let founding = Command::FoundWithUserDefaults {
        founding: Box::new(founding),
        defaults: defaults(),
    };
    expect!["0803fdefcdab896745230101fb2c01fd0068e5cf8b0100001e2a2eebf86781709645fbd3d7c7ded5ace385c2e22ed24abcacbe8be9c1e346eec0af9a6829d688e6ebec76c2228e36e4536bfa2d70375279c883f50ba788c0b7e2f3bf8b8b074abfaa0eff1bcfcde64b0af90ec70debab14633d2ea72aa70fa10ed4a7d77df75f46e62c7aed7b27c80f075aed7f31214188da9bde807018aec516dfb83c0c6d8cd2b075a88634627fee807bc76b70d23cd711cee0b194327d34387f3204f5547e4958f040b44bc8bfa78e74b6fe82bc8fe1ad8f937c9ff8e0b38e0101020001c80000fb0010fb102700000100fb88130000fb881301fb0004fb6d0600000000fbf401000001040001fbe8030002047465616d"].assert_eq(&written(founding));
}

#[test]
fn a_backend_with_a_role_encodes_to_golden_bytes() {
    let written = |role, version| {
        let spec = BackendSpec {
            id: "a".to_owned(),
            url: "http://a:1".to_owned(),
            models: vec!["*".to_owned()],
            labels: [("zone".to_owned(), "x".to_owned())].into(),
            capacity_blocks: None,
            kv_events: None,
            kv_replay: None,
            role,
        };
        let envelope = envelope(Lane::Admin, Command::PutBackend(spec));
        assert_eq!(format_of(&envelope.command), version);
        let bytes = encode_envelope(&envelope);
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
        hex(&bytes)
    };
    expect!["0203fdefcdab896745230101fb2c01fd0068e5cf8b0100000201610a687474703a2f2f613a3101012a01047a6f6e650178000000"].assert_eq(&written(BackendRole::Both, 2));
    expect!["0803fdefcdab896745230101fb2c01fd0068e5cf8b0100000201610a687474703a2f2f613a3101012a020c71756f726174652e726f6c650770726566696c6c047a6f6e650178000000"].assert_eq(&written(BackendRole::Prefill, 8));
    expect!["0803fdefcdab896745230101fb2c01fd0068e5cf8b0100000201610a687474703a2f2f613a3101012a020c71756f726174652e726f6c65066465636f6465047a6f6e650178000000"].assert_eq(&written(BackendRole::Decode, 8));
}
