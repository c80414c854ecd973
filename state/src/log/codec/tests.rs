//! Tests of the format's golden bytes, and of untrusted input, which must do no harm.

use expect_test::expect;
use proptest::prelude::*;

use super::*;
use crate::backends::BackendRole;
use crate::budgets::Budget;
use crate::caches::CacheScope;
use crate::command::{
    BackendSpec, BatchReply, Charge, Command, EngineFacts, Founding, Item, Lane, LeaseOutcome,
    Origin, Rejection, UserDefaults, UserSettings,
};
use crate::discovery::{Discovery, DiscoveryChange};
use crate::ids::{
    AgentSessionKey, ApiKeyId, AttemptId, BackendRef, BlockHash, Incarnation, ModelKey, ReplicaId,
    RestoreId, SessionId, Slot, SourceKey, UserKey,
};
use crate::keys::{ApiKeySpec, SecretHash};
use crate::policy::{
    BlockNaming, CostSettings, PolicyConfig, RoutingSettings, Touch, VllmCacheAwareSettings,
};
use crate::ratios::TextSample;
use crate::reader_assignment::Assignment;
use crate::service::BeliefSample;
use crate::settings::{AdmissionSettings, UserLimits};

pub(super) fn envelope(lane: Lane, command: Command) -> Envelope {
    let (replica, session) = (ReplicaId(3), SessionId(0x0123_4567_89ab_cdef));
    let origin = Origin {
        replica,
        session,
        lane,
        seq: 300,
    };
    Envelope {
        origin,
        proposed_at_ms: 1_700_000_000_000,
        command,
    }
}

fn backend(slot: u16, incarnation: u32) -> BackendRef {
    BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

fn hashes(count: u64) -> Vec<BlockHash> {
    (1..=count)
        .map(|number| BlockHash(number * 0x1111))
        .collect()
}

fn spec() -> BackendSpec {
    BackendSpec {
        id: "gpu-1".to_owned(),
        url: "http://10.0.0.1:8000".to_owned(),
        models: vec!["*".to_owned()],
        labels: [("zone".to_owned(), "a".to_owned())].into(),
        capacity_blocks: Some(30_000),
        kv_events: Some("tcp://10.0.0.1:5557".to_owned()),
        kv_replay: None,
        role: crate::command::BackendRole::Both,
    }
}

/// Returns at least one command of each kind, in the order of the enum.
fn commands() -> Vec<Command> {
    [
        cluster_commands(),
        user_commands(),
        key_and_restore_commands(),
    ]
    .concat()
}

fn cluster_commands() -> Vec<Command> {
    let name = || "ada".to_owned();
    let discover = |change| {
        let source = "pods".to_owned();
        Command::Discover(Box::new(Discovery { source, change }))
    };
    vec![
        Command::from(Founding::of_seed(42, PolicyConfig::LeastRequest)),
        Command::Batch {
            base_attempt: AttemptId(700),
            items: Vec::new(),
        },
        Command::ExpireSession {
            replica: ReplicaId(2),
            session: SessionId(9),
        },
        Command::PutBackend(spec()),
        Command::PutBackend(BackendSpec {
            role: BackendRole::Prefill,
            ..spec()
        }),
        Command::DeleteBackend { name: name() },
        Command::SetDraining {
            name: name(),
            draining: true,
            moves_streams: false,
        },
        discover(DiscoveryChange::Found(spec())),
        discover(DiscoveryChange::Lost { name: name() }),
        discover(DiscoveryChange::Forgotten { name: name() }),
        Command::SetRanks {
            backend: backend(3, 2),
            ranks: 4,
        },
        Command::AssignReaders(vec![Assignment {
            backend: backend(3, 2),
            replica: ReplicaId(1),
        }]),
        Command::PutPolicy(PolicyConfig::Cost(CostSettings::default())),
        Command::PutRouting(RoutingSettings::default()),
        Command::PutAdmission(AdmissionSettings::default()),
    ]
}

fn user_commands() -> Vec<Command> {
    let name = || "ada".to_owned();
    let limits = UserLimits {
        requests: Some(7),
        ..UserLimits::default()
    };
    let budget = Budget {
        day: Some(1000),
        month: None,
    };
    vec![
        Command::PutUserDefaults(Box::new(UserDefaults {
            weight_milli: 500,
            limits,
            budget,
            cache: CacheScope::Group("team".to_owned()),
        })),
        Command::ConfigureUser {
            name: name(),
            settings: Box::new(UserSettings {
                weight_milli: Some(2000),
                limits: Some(limits),
                budget: Some(budget),
                models: vec!["m*".to_owned()],
                cache: Some(CacheScope::Own),
            }),
        },
        Command::ForgiveUser { name: name() },
        Command::EndTree {
            root: AgentSessionKey(0xf00d),
        },
        Command::DeleteUser { name: name() },
    ]
}

fn key_and_restore_commands() -> Vec<Command> {
    let (id, restore) = (ApiKeyId(0xabcd), RestoreId(5));
    vec![
        Command::CreateKey(Box::new(ApiKeySpec {
            id,
            secret: SecretHash([7; 32]),
            name: "ci".to_owned(),
            user: "ada".to_owned(),
            expires_at_ms: Some(300),
            models: vec!["m".to_owned()],
            scopes: vec!["/v1/*".to_owned()],
        })),
        Command::RotateKey {
            id,
            secret: SecretHash([8; 32]),
            grace_ms: 3_600_000,
        },
        Command::RevokeKey { id },
        Command::BeginRestore {
            restore,
            force: true,
        },
        Command::RestorePart {
            restore,
            number: 7,
            bytes: vec![1, 2, 3],
        },
        Command::FinishRestore {
            restore,
            bytes: 300,
        },
        Command::AbortRestore { restore },
    ]
}

fn facts() -> EngineFacts {
    EngineFacts {
        models: Some(vec!["m".to_owned()]),
        capacity_blocks: Some(100),
        started_at_s: None,
        drops_last_block: Some(true),
    }
}

fn items() -> Vec<Item> {
    let charge = Charge {
        user: UserKey(0xfeed),
        input_uncached: 300,
        output: 70,
        started: 1,
        ended: 2,
        ..Charge::default()
    };
    [
        Item::Acquire {
            attempt: 0,
            backend: backend(2, 1),
            tip: None,
            new: hashes(2),
        },
        Item::Acquire {
            attempt: 130,
            backend: backend(200, 300),
            tip: Some(BlockHash(7)),
            new: vec![],
        },
        Item::Acquire {
            attempt: 1,
            backend: backend(0, 1),
            tip: None,
            new: hashes(15),
        },
        Item::Materialize {
            attempt: 3,
            new: hashes(1),
        },
        Item::Release {
            attempt: 4,
            outcome: LeaseOutcome::Kept,
        },
        Item::Release {
            attempt: u32::MAX,
            outcome: LeaseOutcome::Discarded,
        },
        Item::DefineUser {
            key: UserKey(0xbeef),
            name: "alice".to_owned(),
        },
        Item::Charge(charge),
        Item::Charge(Charge::default()),
        Item::ObserveEngine {
            backend: backend(1, 1),
            facts: facts(),
        },
        Item::ObserveText(TextSample {
            model: ModelKey(0xabcd),
            bytes: 9000,
            tokens: 2000,
        }),
        value_tests::demand(),
        Item::ObserveBlockSize {
            backend: backend(1, 2),
            tokens: 256,
        },
        Item::ObserveBelief(BeliefSample {
            backend: backend(3, 2),
            held: 40,
            lost: 3,
            found: 1,
            computed_blocks: 300,
        }),
    ]
    .into_iter()
    .chain(value_tests::session_items())
    .collect()
}

fn replies() -> Vec<Reply> {
    let batch = BatchReply {
        missing_tip: vec![AttemptId(5), AttemptId(700)],
        dropped: 1,
    };
    let name = "gpu-1".to_owned();
    let (field, expected) = ("url".to_owned(), "a url".to_owned());
    let id = ApiKeyId(0xabcd);
    vec![
        Reply::Applied,
        Reply::Batch(batch.clone()),
        Reply::Repeated(Box::new(Reply::Applied)),
        Reply::Repeated(Box::new(Reply::Batch(batch))),
        Reply::Rejected(Rejection::NotInitialised),
        Reply::Rejected(Rejection::AlreadyInitialised),
        Reply::Rejected(Rejection::StaleSession {
            replica: ReplicaId(2),
        }),
        Reply::Rejected(Rejection::UnknownBackend { name: name.clone() }),
        Reply::Rejected(Rejection::TooManyBackends),
        Reply::Rejected(Rejection::TooManyUsers),
        Reply::Rejected(Rejection::Invalid { field, expected }),
        Reply::Rejected(Rejection::UnknownUser { name: name.clone() }),
        Reply::Rejected(Rejection::UserBusy { name: name.clone() }),
        Reply::Rejected(Rejection::TooManyKeys),
        Reply::Rejected(Rejection::UnknownKey { id }),
        Reply::Rejected(Rejection::KeyTaken { id }),
        Reply::Rejected(Rejection::NotOfSource { name }),
    ]
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn commands_encode_to_golden_bytes() {
    let mut golden = String::new();
    for command in commands() {
        let envelope = envelope(Lane::Admin, command);
        let bytes = encode_envelope(&envelope);
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
        // Builds that rehearse the next format differ in the version alone.
        let (version, rest) = bytes.split_first().unwrap();
        assert_eq!(*version, format_of(&envelope.command));
        golden += &format!("{}\n", hex(rest));
    }
    expect![[r#"
        03fdefcdab896745230101fb2c01fd0068e5cf8b010000002a2eebf86781709645fbd3d7c7ded5ace385c2e22ed24abcacbe8be9c1e346eec0af9a6829d688e6ebec76c2228e36e4536bfa2d70375279c883f50ba788c0b7e2f3bf8b8b074abfaa0eff1bcfcde64b0af90ec70debab14633d2ea72aa70fa10ed4a7d77df75f46e62c7aed7b27c80f075aed7f31214188da9bde807018aec516dfb83c0c6d8cd2b075a88634627fee807bc76b70d23cd711cee0b194327d34387f3204f5547e4958f040b44bc8bfa78e74b6fe82bc8fe1ad8f937c9ff8e0b38e010102000001c8fca0860100fc400d03000000fb0010fb1027000100fb88130000005cfbe803000000000000000000
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000001fbbc0200
        03fdefcdab896745230101fb2c01fd0068e5cf8b010000020209
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000003056770752d3114687474703a2f2f31302e302e302e313a3830303001012a01047a6f6e65016101fb307501137463703a2f2f31302e302e302e313a353535370000
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000003056770752d3114687474703a2f2f31302e302e302e313a3830303001012a01047a6f6e65016101fb307501137463703a2f2f31302e302e302e313a353535370001
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000403616461
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000005036164610100
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000604706f647300056770752d3114687474703a2f2f31302e302e302e313a3830303001012a01047a6f6e65016101fb307501137463703a2f2f31302e302e302e313a353535370000
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000604706f64730103616461
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000604706f64730203616461
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000007030204
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000801030201
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000900fca0860100fc40420f00fc80f0fa02
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000a000001c8fca0860100fc400d0300
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000b0000fb0010fb1027000100fb88130000005c
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000cfbf40102047465616d0107000000000001fbe80300
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000d0361646101fbd00701010700000000000101fbe8030001026d2a0101
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000e03616461
        03fdefcdab896745230101fb2c01fd0068e5cf8b010000170df0000000000000
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100000f03616461
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000010cdab00000000000007070707070707070707070707070707070707070707070707070707070707070263690361646101fb2c0101016d01052f76312f2a
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000011cdab0000000000000808080808080808080808080808080808080808080808080808080808080808fc80ee3600
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000012cdab000000000000
        03fdefcdab896745230101fb2c01fd0068e5cf8b010000130501
        03fdefcdab896745230101fb2c01fd0068e5cf8b01000014050703010203
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100001505fb2c01
        03fdefcdab896745230101fb2c01fd0068e5cf8b0100001605
    "#]].assert_eq(&golden);
}

#[test]
fn items_encode_to_golden_bytes() {
    let mut golden = String::new();
    for item in items() {
        let bytes = to_bytes(&item);
        assert_eq!(from_bytes::<Item, DECODE_BYTES_MAX>(&bytes).unwrap(), item);
        golden += &format!("{}\n", hex(&bytes));
    }
    expect![[r#"
        2000020111110000000000002222000000000000
        088201c801ac020700000000000000
        f00100010f111100000000000022220000000000003333000000000000444400000000000055550000000000006666000000000000777700000000000088880000000000009999000000000000aaaa000000000000bbbb000000000000cccc000000000000dddd000000000000eeee000000000000ffff000000000000
        11031111000000000000
        0204
        0affffffff0f
        03efbe00000000000005616c696365
        ecedfe000000000000ac02460102
        040000000000000000
        0501010101016d0164000101
        1fcdab000000000000a846d00f
        67016d03fb2c01fc7011010009
        2701028002
        2f0302280301ac02
        37edfe000000000000010df0000000000000efbe000000000000cdab0000000000000302
        3f80d4610101
        470abc05e0c508bc03
        4f000900000000000000
        5707bc0a000000000000ef0d000000000000ac028402efbe000000000000bc0314000900000000000000000000
        5700bc0a000000000000ef0d00000000000004efbe00000000000020
        178404efbe000000000000ce5000000000000046
        5f01cdab000000000000016d
    "#]].assert_eq(&golden);
    let batch = Command::Batch {
        base_attempt: AttemptId(1),
        items: items(),
    };
    let envelope = envelope(Lane::Outbox, batch);
    assert_eq!(
        decode_envelope(&encode_envelope(&envelope)).unwrap(),
        envelope
    );
}

#[test]
fn replies_encode_to_golden_bytes() {
    let mut golden = String::new();
    for reply in replies() {
        let bytes = encode_reply(&reply);
        assert_eq!(decode_reply(&bytes).unwrap(), reply);
        golden += &format!("{}\n", hex(&bytes));
    }
    expect![[r#"
        0100
        01010205fbbc0201
        010200
        0102010205fbbc0201
        010300
        010301
        01030202
        010303056770752d31
        010304
        010305
        0103060375726c05612075726c
        010307056770752d31
        010308056770752d31
        010309
        01030acdab000000000000
        01030bcdab000000000000
        01030c056770752d31
    "#]]
    .assert_eq(&golden);
}

#[test]
fn an_untouched_release_encodes_to_golden_bytes() {
    let release = Item::Release {
        attempt: 5,
        outcome: LeaseOutcome::KeptUntouched,
    };
    assert_eq!(to_bytes(&release), [0x12, 5]);
    let read: Item = from_bytes::<_, 64>(&[0x12, 5]).unwrap();
    assert_eq!(read, release);
    assert!(from_bytes::<Item, 64>(&[0x1a, 5]).is_err());
    let position = PolicyConfig::VllmCacheAware(VllmCacheAwareSettings {
        hashing: BlockNaming::Position,
        touch: Touch::Sampled,
        ..VllmCacheAwareSettings::default()
    });
    let bytes = to_bytes(&position);
    assert_eq!(bytes[bytes.len() - 2..], [1, 1], "the new words come last");
    assert_eq!(from_bytes::<PolicyConfig, 64>(&bytes).unwrap(), position);
}

#[test]
fn a_request_takes_at_most_sixteen_bytes_besides_new_blocks() {
    // The replica is busy and has a thousand open requests, so offsets take two bytes.
    let request = |attempt: u32, blocks| {
        let (backend, tip) = (backend(100, 100), Some(BlockHash(u64::MAX)));
        let acquire = Item::Acquire {
            attempt,
            backend,
            tip,
            new: hashes(blocks),
        };
        let release = Item::Release {
            attempt,
            outcome: LeaseOutcome::Kept,
        };
        to_bytes(&acquire).len() + to_bytes(&release).len()
    };
    assert_eq!(
        [request(10, 0), request(1000, 0), request(16_000, 0)],
        [14, 16, 16]
    );
    assert_eq!(request(1000, 14), 16 + 14 * 8);
    assert_eq!(request(1000, 15), 17 + 15 * 8);
}

#[test]
fn invalid_commands_are_refused_with_a_reason() {
    let good = encode_envelope(&envelope(Lane::Outbox, commands().remove(1)));
    let reason = |bytes: &[u8]| decode_envelope(bytes).unwrap_err().to_string();
    let mut other_version = good.clone();
    other_version[0] = 99;
    let trailing = [&good[..], &[0]].concat();
    let reasons = [
        reason(&[]),
        reason(&other_version),
        reason(&trailing),
        reason(&good[..good.len() - 1]),
        reason(&vec![1; ENVELOPE_BYTES_MAX + 1]),
    ];
    expect![[r#"
        decode log entry: no bytes
        decode log entry: format version 99, one up to N expected
        decode log entry: 1 trailing bytes after byte 28
        decode log entry: UnexpectedEnd { additional: 1 }
        decode log entry: 1048577 bytes, at most 1048576 expected"#]]
    .assert_eq(
        &reasons
            .join("\n")
            .replace(&format!("to {FORMAT_VERSION} "), "to N "),
    );
}

#[test]
fn undefined_bits_are_refused() {
    for tag in [1 | 8, 2 | 32, 3 | 8, 5 | 8, 6 | 8, 7 | 2 << 3, 255] {
        let bytes = [&[tag][..], &[0; 64]].concat();
        let read = from_bytes::<Item, DECODE_BYTES_MAX>(&bytes);
        assert!(read.is_err(), "{tag:#04x}");
    }
    let endless = [&[2][..], &[0xff; 20]].concat();
    assert!(from_bytes::<Item, DECODE_BYTES_MAX>(&endless).is_err());
}

#[test]
fn a_forged_length_causes_no_allocation() {
    // The bytes encode an acquire of 2^40 blocks, and a batch of 2^60 items.
    let acquire = [0xf0, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x80, 0x20];
    assert!(from_bytes::<Item, DECODE_BYTES_MAX>(&acquire).is_err());
    let empty = encode_envelope(&envelope(Lane::Outbox, commands().remove(1)));
    let mut forged = empty[..empty.len() - 1].to_vec();
    forged.push(253);
    forged.extend((1_u64 << 60).to_le_bytes());
    assert!(decode_envelope(&forged).is_err());
}

#[test]
fn the_densest_envelope_can_be_decoded() {
    let releases = (ENVELOPE_BYTES_MAX - 64) / 2;
    let items = vec![
        Item::Release {
            attempt: 1,
            outcome: LeaseOutcome::Kept
        };
        releases
    ];
    let dense = envelope(
        Lane::Outbox,
        Command::Batch {
            base_attempt: AttemptId(1),
            items,
        },
    );
    assert_eq!(decode_envelope(&encode_envelope(&dense)).unwrap(), dense);
    let models = vec![String::new(); ENVELOPE_BYTES_MAX - 200];
    let wide = envelope(
        Lane::Admin,
        Command::PutBackend(BackendSpec { models, ..spec() }),
    );
    assert_eq!(decode_envelope(&encode_envelope(&wide)).unwrap(), wide);
}

proptest! {
    #[test]
    fn foreign_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200)) {
        let _ = decode_reply(&bytes);
        bytes[0] = FORMAT_VERSION;
        let _ = decode_reply(&bytes);
        let _ = decode_envelope(&bytes);
        let _ = from_bytes::<Vec<Item>, DECODE_BYTES_MAX>(&bytes[1..]);
    }

    #[test]
    fn damaged_commands_never_panic_and_valid_ones_round_trip(
        place in any::<prop::sample::Index>(), byte: u8, which in any::<prop::sample::Index>(),
    ) {
        let batch = Command::Batch { base_attempt: AttemptId(1), items: items() };
        let command = if which.index(2) == 0 { batch } else { which.get(&commands()).clone() };
        let mut bytes = encode_envelope(&envelope(Lane::Outbox, command));
        let place = place.index(bytes.len());
        bytes[place] = byte;
        if let Ok(envelope) = decode_envelope(&bytes) {
            prop_assert_eq!(decode_envelope(&encode_envelope(&envelope)).unwrap(), envelope);
        }
    }

    #[test]
    fn charges_round_trip(
        user: u64,
        counts: [u64; 3],
        started: u32,
        ended: u32,
        source in prop_oneof![Just(0), any::<u64>()],
        more in prop::option::of(any::<(u32, u32, u64, u64)>()),
    ) {
        let [input_uncached, input_cached, output] = counts;
        let (queued, dequeued, advance, settled) = more.unwrap_or_default();
        let user = UserKey(user);
        let item =
            Item::Charge(Charge {
            source: SourceKey(source), user, input_uncached, input_cached, output, started, ended, queued, dequeued, advance, settled,
        });
        prop_assert_eq!(from_bytes::<Item, DECODE_BYTES_MAX>(&to_bytes(&item)).unwrap(), item);
    }
}
