//! Tests of the format's golden bytes, and of untrusted input, which must do no harm.

use expect_test::expect;
use proptest::prelude::*;

use super::*;
use crate::command::{
    BackendSpec, BatchReply, Charge, Command, EngineFacts, Founding, Item, Lane, LeaseOutcome,
    Origin, Rejection, UserSpec,
};
use crate::ids::{
    ApiKeyId, AttemptId, BackendRef, BlockHash, Incarnation, ModelKey, ReplicaId, SessionId, Slot,
    UserKey,
};
use crate::keys::{ApiKeySpec, SecretHash};
use crate::policy::{
    BlockNaming, CostSettings, PolicyConfig, RoutingSettings, Touch, VllmCacheAwareSettings,
};
use crate::prefix::HashSecret;
use crate::pricing::FairnessSettings;
use crate::ratios::TextSample;
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

fn commands() -> Vec<Command> {
    let name = "gpu-1".to_owned();
    let policy = PolicyConfig::Cost(CostSettings::default());
    vec![
        Command::InitCluster {
            hash_seed: 42,
            policy: policy.clone(),
            fairness: FairnessSettings::default(),
        },
        Command::Batch {
            base_attempt: AttemptId(700),
            items: Vec::new(),
        },
        Command::PutBackend(spec()),
        Command::DeleteBackend { name: name.clone() },
        Command::SetDraining {
            name,
            draining: true,
        },
        Command::PutUser(UserSpec {
            name: "alice".to_owned(),
            weight_milli: 2000,
        }),
        Command::PutPolicy(PolicyConfig::LeastRequest),
        Command::PutPolicy(policy),
        Command::ExpireSession {
            replica: ReplicaId(2),
            session: SessionId(9),
        },
    ]
}

fn items() -> Vec<Item> {
    let charge = Charge {
        user: UserKey(0xfeed),
        input_uncached: 300,
        input_cached: 0,
        output: 70,
        started: 1,
        ended: 2,
        ..Charge::default()
    };
    let facts = EngineFacts {
        models: Some(vec!["m".to_owned()]),
        capacity_blocks: Some(100),
        started_at_s: None,
    };
    vec![
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
            facts,
        },
    ]
}

fn replies() -> Vec<Reply> {
    let batch = BatchReply {
        missing_tip: vec![AttemptId(5), AttemptId(700)],
        dropped: 1,
    };
    let name = "gpu-1".to_owned();
    let (field, expected) = ("url".to_owned(), "a url".to_owned());
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
        Reply::Rejected(Rejection::UserBusy { name }),
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
        golden += &format!("{}\n", hex(&bytes));
    }
    expect![[r#"
        0203fdefcdab896745230101fb2c01fd0068e5cf8b010000002a00fca0860100fc40420f00fc80f0fa02fb8403fc404b4c00fb2c01140102
        0203fdefcdab896745230101fb2c01fd0068e5cf8b01000001fbbc0200
        0203fdefcdab896745230101fb2c01fd0068e5cf8b01000002056770752d3114687474703a2f2f31302e302e302e313a3830303001012a01047a6f6e65016101fb307501137463703a2f2f31302e302e302e313a3535353700
        0203fdefcdab896745230101fb2c01fd0068e5cf8b01000003056770752d31
        0203fdefcdab896745230101fb2c01fd0068e5cf8b01000004056770752d3101
        0203fdefcdab896745230101fb2c01fd0068e5cf8b0100000505616c696365fbd007
        0203fdefcdab896745230101fb2c01fd0068e5cf8b0100000601
        0203fdefcdab896745230101fb2c01fd0068e5cf8b0100000600fca0860100fc40420f00fc80f0fa02fb8403fc404b4c00fb2c0114
        0203fdefcdab896745230101fb2c01fd0068e5cf8b010000070209
    "#]].assert_eq(&golden);
}

/// Lists the bytes of each policy by name, to show whether the settings of a policy have changed or
/// an entry was inserted before another.
#[test]
fn policies_encode_to_golden_bytes() {
    let mut golden = String::new();
    for policy in PolicyConfig::defaults() {
        let bytes = to_bytes(&policy);
        let back = from_bytes::<PolicyConfig, DECODE_BYTES_MAX>(&bytes);
        assert_eq!(back.as_ref(), Ok(&policy));
        golden += &format!("{} {}\n", policy.name(), hex(&bytes));
        let envelope = envelope(Lane::Admin, Command::PutPolicy(policy));
        assert_eq!(
            decode_envelope(&encode_envelope(&envelope)).unwrap(),
            envelope
        );
    }
    expect![[r#"
        cost 00fca0860100fc40420f00fc80f0fa02fb8403fc404b4c00fb2c0114
        least-request 01
        lmetric 02fb000114
        prefix-cache 0310fbd00702
        vllm-cache-aware 04fb2c01fbe2040000
        epp 050302024000320a
        chwbl 0601fb0001fbe204
        session 0711782d71756f726174652d73657373696f6e00
        power-of-two 08
        round-robin 09
        random 0a
        least-kv 0b14
        vtc-basic 0c0005fbe803fb401ffbe803fbd00764fbe803fbe803
        preble-e2 0dfbf401fbd007fbf401fca0860100fc40420f0014
    "#]]
    .assert_eq(&golden);
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
        0501010101016d016400
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
        0200
        02010205fbbc0201
        020200
        0202010205fbbc0201
        020300
        020301
        02030202
        020303056770752d31
        020304
        020305
        0203060375726c05612075726c
        020307056770752d31
        020308056770752d31
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
    other_version[0] = FORMAT_VERSION + 1;
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
        decode log entry: format version 11, 10 or an earlier one expected
        decode log entry: 1 trailing bytes after byte 28
        decode log entry: UnexpectedEnd { additional: 1 }
        decode log entry: 1048577 bytes, at most 1048576 expected"#]]
    .assert_eq(&reasons.join("\n"));
}

#[test]
fn commands_of_the_first_version_are_read() {
    for command in commands() {
        let envelope = envelope(Lane::Admin, command);
        let mut bytes = encode_envelope(&envelope);
        bytes[0] = FORMAT_VERSION_FIRST;
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
    }
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

#[test]
#[should_panic(expected = "above the limit")]
fn an_overlong_command_is_not_encoded() {
    let name = "x".repeat(ENVELOPE_BYTES_MAX);
    let _ = encode_envelope(&envelope(Lane::Admin, Command::DeleteBackend { name }));
}

#[test]
fn nested_repeats_cannot_exhaust_the_stack() {
    let forged = [&[FORMAT_VERSION][..], &[2; 1 << 20]].concat();
    assert!(decode_reply(&forged).is_err());
    let nested = Reply::Repeated(Box::new(Reply::Repeated(Box::new(Reply::Applied))));
    let flat = Reply::Repeated(Box::new(Reply::Applied));
    assert_eq!(decode_reply(&encode_reply(&nested)).unwrap(), flat);
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
        more in prop::option::of(any::<(u32, u32, u64, u64)>()),
    ) {
        let [input_uncached, input_cached, output] = counts;
        let (queued, dequeued, advance, settled) = more.unwrap_or_default();
        let user = UserKey(user);
        let item =
            Item::Charge(Charge {
            user, input_uncached, input_cached, output, started, ended, queued, dequeued, advance, settled,
        });
        prop_assert_eq!(from_bytes::<Item, DECODE_BYTES_MAX>(&to_bytes(&item)).unwrap(), item);
    }
}

#[test]
fn version_4_commands_encode_to_golden_bytes() {
    let written = |command| {
        let envelope = envelope(Lane::Admin, command);
        let bytes = encode_envelope(&envelope);
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
        hex(&bytes)
    };
    expect!["0403fdefcdab896745230101fb2c01fd0068e5cf8b01000012"]
        .assert_eq(&written(Command::PaceTime));
    let delete = Command::DeleteUser {
        name: "ada".to_owned(),
    };
    expect!["0403fdefcdab896745230101fb2c01fd0068e5cf8b0100001503616461"]
        .assert_eq(&written(delete));
    let set = Command::SetUser {
        user: UserSpec {
            name: "ada".to_owned(),
            weight_milli: 2000,
        },
        limits: UserLimits {
            requests: Some(7),
            ..UserLimits::default()
        },
    };
    expect!["0403fdefcdab896745230101fb2c01fd0068e5cf8b0100001303616461fbd0070107000000"]
        .assert_eq(&written(set));
    let founding = Founding {
        hash_seed: 42,
        hash_secret: HashSecret::of_number(42),
        policy: PolicyConfig::LeastRequest,
        fairness: FairnessSettings::default(),
        routing: RoutingSettings::default(),
        admission: AdmissionSettings::default(),
    };
    expect!["0403fdefcdab896745230101fb2c01fd0068e5cf8b010000142a2eebf86781709645fbd3d7c7ded5ace385c2e22ed24abcacbe8be9c1e346eec0af9a6829d688e6ebec76c2228e36e4536bfa2d70375279c883f50ba788c0b7e2f3bf8b8b074abfaa0eff1bcfcde64b0af90ec70debab14633d2ea72aa70fa10ed4a7d77df75f46e62c7aed7b27c80f075aed7f31214188da9bde807018aec516dfb83c0c6d8cd2b075a88634627fee807bc76b70d23cd711cee0b194327d34387f3204f5547e4958f040b44bc8bfa78e74b6fe82bc8fe1ad8f937c9ff8e0b38e0101020001c80000fb0010fb102700000100fb88130000fb881301fb0004fb6d0600000000"].assert_eq(&written(Command::FoundWithSettings(Box::new(founding))));
}

#[test]
fn version_5_commands_encode_to_golden_bytes() {
    let written = |command| {
        let envelope = envelope(Lane::Admin, command);
        let bytes = encode_envelope(&envelope);
        assert_eq!(decode_envelope(&bytes).unwrap(), envelope);
        hex(&bytes)
    };
    let create = Command::CreateKey(Box::new(ApiKeySpec {
        id: ApiKeyId(0xabcd),
        secret: SecretHash([7; 32]),
        name: "ci".to_owned(),
        user: "ada".to_owned(),
        expires_at_ms: Some(300),
        models: vec!["m".to_owned()],
        scopes: vec!["/v1/*".to_owned()],
    }));
    expect!["0503fdefcdab896745230101fb2c01fd0068e5cf8b01000016cdab00000000000007070707070707070707070707070707070707070707070707070707070707070263690361646101fb2c0101016d01052f76312f2a"].assert_eq(&written(create));
    let id = ApiKeyId(0xabcd);
    expect!["0503fdefcdab896745230101fb2c01fd0068e5cf8b01000017cdab000000000000"]
        .assert_eq(&written(Command::RevokeKey { id }));
    let rotate = Command::RotateKey {
        id,
        secret: SecretHash([8; 32]),
        grace_ms: 3_600_000,
    };
    expect!["0503fdefcdab896745230101fb2c01fd0068e5cf8b01000018cdab0000000000000808080808080808080808080808080808080808080808080808080808080808fc80ee3600"].assert_eq(&written(rotate));
    for reject in [
        Rejection::TooManyKeys,
        Rejection::UnknownKey { id },
        Rejection::KeyTaken { id },
    ] {
        let reply = Reply::Rejected(reject);
        assert_eq!(decode_reply(&encode_reply(&reply)).unwrap(), reply);
    }
    expect!["02030bcdab000000000000"].assert_eq(&hex(&encode_reply(&Reply::Rejected(
        Rejection::KeyTaken { id },
    ))));
}

#[test]
fn version_4_items_encode_to_golden_bytes_and_raise_the_batch() {
    let text = Item::ObserveText(TextSample {
        model: ModelKey(0xabcd),
        bytes: 9000,
        tokens: 2000,
    });
    let written = |item: Item| {
        let bytes = to_bytes(&item);
        assert_eq!(from_bytes::<Item, 64>(&bytes).unwrap(), item);
        hex(&bytes)
    };
    expect!["1fcdab000000000000a846d00f"].assert_eq(&written(text.clone()));
    let size = Item::ObserveBlockSize {
        backend: backend(1, 2),
        tokens: 256,
    };
    expect!["2701028002"].assert_eq(&written(size.clone()));
    let batch = |items| Command::Batch {
        base_attempt: AttemptId(1),
        items,
    };
    assert_eq!(format_of(&batch(items())), FORMAT_VERSION_COMMON);
    let at = |url: &str| {
        Command::PutBackend(BackendSpec {
            url: url.to_owned(),
            ..spec()
        })
    };
    assert_eq!(format_of(&at("http://a:1")), FORMAT_VERSION_COMMON);
    assert_eq!(format_of(&at("http://a:1/x")), 4);
    for newer in [text, size] {
        assert_eq!(format_of(&batch([items(), vec![newer]].concat())), 4);
    }
}
