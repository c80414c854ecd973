//! Decoding of payloads: recorded, made-up and damaged ones.

use proptest::prelude::*;
use rmp::encode as pack;

use super::*;
use crate::kv_events::fixtures;

/// Returns a payload with one event, which is given as msgpack.
fn payload(event: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93\xcb\x41\xda\xc0\x01\x41\x62\x63\xda\x91".to_vec();
    bytes.extend(event);
    bytes.push(0xc0);
    bytes
}

fn one(event: &[u8]) -> EngineEvent {
    let mut payload = decode(&payload(event)).unwrap();
    assert_eq!(payload.events.len(), 1);
    payload.events.remove(0)
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    pack::write_str(bytes, text).unwrap();
}

#[test]
fn recorded_streams_decode_completely() {
    for (name, block_size) in [("vllm012_bs16", 16), ("vllm032_bs32", 32)] {
        let messages = fixtures::messages(name);
        let mut events = 0;
        for message in messages {
            let payload = decode(&message.payload).unwrap();
            assert_eq!(payload.rank, Some(0));
            for event in payload.events {
                match event {
                    EngineEvent::Stored(stored) => {
                        assert_eq!(stored.block_size, block_size);
                        let tokens = stored.hashes.len() * block_size as usize;
                        assert_eq!(stored.tokens.len(), tokens);
                        assert_eq!(stored.place.medium, CacheMedium::Gpu);
                        assert!(!stored.keys.has_adapter);
                        assert_eq!(stored.keys.foreign_from, None);
                    }
                    EngineEvent::Removed(removed) => assert_eq!(removed.hashes.len(), 1),
                    EngineEvent::Cleared => {}
                    EngineEvent::Unknown => panic!("{name}: an event of message {}", message.seq),
                }
                events += 1;
            }
        }
        assert!(events > messages.len());
    }
}

#[test]
fn recorded_salts_are_read() {
    let salts: Vec<String> = fixtures::messages("vllm032_bs32")
        .iter()
        .flat_map(|message| decode(&message.payload).unwrap().events)
        .filter_map(|event| match event {
            EngineEvent::Stored(stored) => stored.keys.salt,
            _ => None,
        })
        .collect();
    assert_eq!(salts, ["tenant-42", "tenant-43"]);
}

#[test]
fn engine_hashes_are_integers_or_trailing_bytes() {
    let mut event = vec![0x92];
    text(&mut event, "BlockRemoved");
    event.push(0x93);
    pack::write_uint(&mut event, 7).unwrap();
    pack::write_sint(&mut event, -1).unwrap();
    let mut digest = [9_u8; 32];
    digest[24..].copy_from_slice(&77_u64.to_be_bytes());
    pack::write_bin(&mut event, &digest).unwrap();
    let EngineEvent::Removed(removed) = one(&event) else {
        panic!("a removal");
    };
    assert_eq!(removed.hashes, [7, u64::MAX, 77].map(EngineHash));
}

#[test]
fn unknown_fields_and_kinds_are_skipped() {
    let mut event = vec![0x84];
    for (name, value) in [
        ("session", &b"\x81\xa1a\x91\x01"[..]),
        ("type", b"\xacBlockRemoved"),
        ("block_hashes", b"\x91\x05"),
        ("medium", b"\xa3CPU"),
    ] {
        text(&mut event, name);
        event.extend(value);
    }
    let EngineEvent::Removed(removed) = one(&event) else {
        panic!("a removal");
    };
    assert_eq!(removed.hashes, [EngineHash(5)]);
    let cpu = CacheMedium::Lower(LowerTier::Cpu);
    assert_eq!(removed.place.medium, cpu);
    assert_eq!(one(b"\x92\xa3New\x01"), EngineEvent::Unknown);
    assert_eq!(one(b"\x81\xa4type\xa3New"), EngineEvent::Unknown);
    assert_eq!(one(b"\x91\xb0AllBlocksCleared"), EngineEvent::Cleared);
    assert_eq!(one(b"\x07"), EngineEvent::Unknown);
    assert_eq!(one(b"\x90"), EngineEvent::Unknown);
}

#[test]
fn mediums_of_engines_name_their_tiers() {
    let medium_of = |medium: &str, locality: Option<&str>| {
        let mut event = vec![0x83 + u8::from(locality.is_some())];
        let fields = [("type", "BlockRemoved"), ("medium", medium)];
        let locality = locality.map(|value| ("locality", value));
        for (name, value) in fields.into_iter().chain(locality) {
            text(&mut event, name);
            text(&mut event, value);
        }
        text(&mut event, "block_hashes");
        event.extend(b"\x91\x05");
        match one(&event) {
            EngineEvent::Removed(removed) => removed.place.medium,
            other => panic!("{other:?}"),
        }
    };
    let lower = CacheMedium::Lower;
    for (name, medium) in [
        ("GPU", CacheMedium::Gpu),
        ("CPU", lower(LowerTier::Cpu)),
        ("CPU_PINNED", lower(LowerTier::Cpu)),
        ("STORAGE", lower(LowerTier::Disk)),
        ("DISK", lower(LowerTier::Disk)),
        ("EXTERNAL", lower(LowerTier::Store)),
        ("TAPE", CacheMedium::Unknown),
    ] {
        assert_eq!(medium_of(name, None), medium, "{name}");
    }
    let remote = medium_of("STORAGE", Some("REMOTE"));
    assert_eq!(remote, lower(LowerTier::Store));
    assert_eq!(medium_of("CPU", Some("LOCAL")), lower(LowerTier::Cpu));
}

#[test]
fn blocks_of_pairs_have_the_first_token_of_each() {
    let with_tokens = |tokens: &[u8]| {
        let event = [b"\x95\xabBlockStored\x91\x01\xc0", tokens, b"\x02"].concat();
        let payload = [b"\x92\x00\x91", &event[..]].concat();
        decode(&payload).map(|payload| payload.events)
    };
    let stored = |tokens: &[u8]| match with_tokens(tokens).unwrap().remove(0) {
        EngineEvent::Stored(stored) => (stored.tokens, stored.block_size),
        other => panic!("{other:?}"),
    };
    let expected = (vec![7, 300], 2);
    assert_eq!(stored(b"\x92\x07\xcd\x01\x2c"), expected);
    assert_eq!(
        stored(b"\x92\x92\x07\xcd\x01\x2c\x92\xcd\x01\x2c\x09"),
        expected
    );
    for bad in [
        &b"\x91\x91\x07"[..],
        b"\x91\x93\x07\x08\x09",
        b"\x91\x92\x07\xa1a",
    ] {
        assert!(with_tokens(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn consecutive_unknown_events_are_collapsed() {
    let mut bytes = b"\x92\x00\xdd\x00\x01\x00\x00".to_vec();
    bytes.extend([0xc0; 1 << 16]);
    assert_eq!(decode(&bytes).unwrap().events, [EngineEvent::Unknown]);
}

#[test]
fn an_unreadable_parent_does_not_make_a_root() {
    for (parent, is_root) in [
        (&b"\xc0"[..], true),
        (b"\xc4\x02ab", false),
        (b"\x91\x05", false),
    ] {
        let mut event = b"\x95\xabBlockStored\x91\x01".to_vec();
        event.extend(parent);
        event.extend(b"\x92\x07\x08\x02");
        let EngineEvent::Stored(stored) = one(&event) else {
            panic!("blocks are stored");
        };
        assert_eq!(stored.parent, None);
        assert_eq!(stored.keys.foreign_from, (!is_root).then_some(0));
    }
}

#[test]
fn unknown_extra_keys_end_the_hashable_blocks() {
    let stored = |extra_keys: &[u8], parent: &[u8]| {
        let mut event = vec![0x85];
        text(&mut event, "type");
        text(&mut event, "BlockStored");
        text(&mut event, "block_hashes");
        event.extend(b"\x93\x01\x02\x03");
        text(&mut event, "parent_block_hash");
        event.extend(parent);
        text(&mut event, "lora_name");
        text(&mut event, "ada");
        text(&mut event, "extra_keys");
        event.extend(extra_keys);
        match one(&event) {
            EngineEvent::Stored(stored) => stored.keys,
            other => panic!("{other:?}"),
        }
    };
    let nil = b"\xc0";
    // The adapter's name is in every block and is not a salt.
    let keys = stored(b"\x93\x91\xa3ada\x91\xa3ada\x91\xa3ada", nil);
    assert_eq!((keys.salt, keys.foreign_from), (None, None));
    let keys = stored(b"\x93\x92\xa3ada\xa4salt\xc0\xc0", nil);
    assert_eq!(
        (keys.salt.as_deref(), keys.foreign_from),
        (Some("salt"), None)
    );
    // Media: a name and a position, a name in a later block, or one in a block that does not start
    // a prompt.
    let keys = stored(b"\x93\xc0\x91\x92\xa1i\x05\xc0", nil);
    assert_eq!(keys.foreign_from, Some(1));
    let keys = stored(b"\x93\xc0\xc0\x91\xa1i", nil);
    assert_eq!(keys.foreign_from, Some(2));
    let keys = stored(b"\x93\x91\xa1i\xc0\xc0", b"\x07");
    assert_eq!((keys.salt, keys.foreign_from), (None, Some(0)));
}

proptest! {
    #[test]
    fn arbitrary_kv_event_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        drop(decode(&bytes));
        drop(decode(&payload(&bytes)));
    }

    #[test]
    fn damaged_recordings_are_decoded_or_refused(
        which in 0_usize..40,
        at in any::<prop::sample::Index>(),
        byte: u8,
        cut in any::<prop::sample::Index>(),
    ) {
        let messages = fixtures::messages("vllm032_bs32");
        let mut bytes = messages[which % messages.len()].payload.to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let decoded = decode(&bytes);
        if let Ok(payload) = decoded {
            prop_assert!(payload.events.len() <= bytes.len());
        }
        bytes.truncate(cut.index(bytes.len()));
        drop(decode(&bytes));
    }
}
