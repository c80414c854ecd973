//! Encoding of KV batches in the log: it never changes, and untrusted input is rejected or sound.

use crate::common;
use expect_test::expect;
use proptest::prelude::*;
use state::codec::{decode_envelope, encode_envelope, item_bytes};
use state::command::{Command, Envelope, Item, Lane};
use state::ids::{BackendRef, BlockHash, EngineHash, Incarnation, Slot};
use state::kv_events::{
    KvBatch, KvEvent, KvMessage, KvRejection, KvUncertainty, KvUpdate, LowerTier,
};

fn item(rank: u16, news: KvUpdate) -> Item {
    Item::KvEvents(KvBatch {
        backend: BackendRef {
            slot: Slot(2),
            incarnation: Incarnation(1),
        },
        rank,
        publisher: 1_795_164_529_972,
        news,
    })
}

fn message(events: Vec<KvEvent>) -> KvMessage {
    KvMessage {
        seq: 300,
        mark: 0x0123_4567_89ab_cdef,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events,
    }
}

fn stored(parent: Option<u64>, count: u64) -> KvEvent {
    KvEvent::Stored {
        parent: parent.map(EngineHash),
        blocks: (1..=count)
            .map(|number| (EngineHash(number), BlockHash(number << 32)))
            .collect(),
    }
}

fn envelope(items: Vec<Item>) -> Envelope {
    common::envelope(1, 1, Lane::Outbox, 1, common::batch(items))
}

/// Returns the item's own bytes, at the end of a batch.
fn bytes(item: &Item) -> String {
    let length = item_bytes(item);
    let bytes = encode_envelope(&envelope(vec![item.clone()]));
    let own = &bytes[bytes.len() - length..];
    own.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_kv_event_encodes_to_golden_bytes() {
    let removed = KvEvent::Removed {
        blocks: vec![EngineHash(9), EngineHash(8)],
    };
    let all = vec![
        stored(None, 1),
        stored(Some(7), 1),
        removed,
        KvEvent::Cleared,
        KvEvent::LeftOut {
            parent: EngineHash(7),
        },
    ];
    let below = vec![
        KvEvent::TierStored {
            tier: LowerTier::Cpu,
            parent: Some(EngineHash(7)),
            blocks: vec![(EngineHash(1), BlockHash(2))],
        },
        KvEvent::TierCopied {
            tier: LowerTier::Disk,
            blocks: vec![EngineHash(9), EngineHash(8)],
        },
        KvEvent::TierRemoved {
            tier: LowerTier::Store,
            blocks: vec![EngineHash(9)],
        },
    ];
    let size = KvRejection::BlockSize {
        engine: 16,
        router: 128,
    };
    let part = KvMessage {
        part: 1,
        is_last: false,
        is_after_loss: true,
        ..message(Vec::new())
    };
    let items = [
        item(0, KvUpdate::Begin),
        item(0, KvUpdate::Message(message(all))),
        item(0, KvUpdate::Message(message(below))),
        item(3, KvUpdate::Message(part)),
        item(0, KvUpdate::Current { seq: None }),
        item(0, KvUpdate::Current { seq: Some(300) }),
        item(0, KvUpdate::Doubt(KvUncertainty::Gap)),
        item(0, KvUpdate::Doubt(KvUncertainty::Unreachable)),
        item(0, KvUpdate::Doubt(KvUncertainty::Behind)),
        item(0, KvUpdate::Doubt(KvUncertainty::Handover)),
        item(0, KvUpdate::Refuse(size)),
        item(0, KvUpdate::Refuse(KvRejection::Tokenizer)),
        item(0, KvUpdate::Refuse(KvRejection::Models)),
        item(0, KvUpdate::Refuse(KvRejection::Unreadable)),
    ];
    let lines: Vec<String> = items.iter().map(|item| bytes(item) + "\n").collect();
    expect![[r#"
        06020100b4ca93c19f34
        4e020100b4ca93c19f34ac02efcdab8967452301000508010000000000000000000000010000000c070000000000000001000000000000000000000001000000110900000000000000080000000000000002070700000000000000
        4e020100b4ca93c19f34ac02efcdab89674523010003030c0700000000000000010000000000000002000000000000000b120900000000000000080000000000000013090900000000000000
        8e020103b4ca93c19f34ac02efcdab89674523010100
        16020100b4ca93c19f34
        56020100b4ca93c19f34ac02
        1e020100b4ca93c19f3400
        1e020100b4ca93c19f3401
        1e020100b4ca93c19f3402
        1e020100b4ca93c19f3403
        26020100b4ca93c19f3400108001
        26020100b4ca93c19f3401
        26020100b4ca93c19f3402
        26020100b4ca93c19f3403
    "#]].assert_eq(&lines.concat());
}

#[test]
fn a_block_takes_the_bytes_of_its_hashes() {
    let cost = |count| {
        item_bytes(&item(
            0,
            KvUpdate::Message(message(vec![stored(Some(7), count)])),
        ))
    };
    assert_eq!((cost(10) - 160, cost(1000) - 16_000), (31, 33));
}

/// Generates any event of a tier below the GPU.
fn below() -> impl Strategy<Value = KvEvent> {
    let tier = (0_usize..3).prop_map(|tier| LowerTier::ALL[tier]);
    let names = prop::collection::vec(any::<u64>().prop_map(EngineHash), 0..40);
    (tier, any::<Option<u64>>(), names, 0_u8..3).prop_map(|(tier, parent, blocks, kind)| match kind
    {
        0 => KvEvent::TierStored {
            tier,
            parent: parent.map(EngineHash),
            blocks: (blocks.iter().map(|name| (*name, BlockHash(name.0 ^ 5)))).collect(),
        },
        1 => KvEvent::TierCopied { tier, blocks },
        _ => KvEvent::TierRemoved { tier, blocks },
    })
}

fn event() -> impl Strategy<Value = KvEvent> {
    let removed = prop::collection::vec(any::<u64>(), 0..40)
        .prop_map(|blocks| blocks.into_iter().map(EngineHash).collect())
        .prop_map(|blocks| KvEvent::Removed { blocks });
    prop_oneof![
        (any::<Option<u64>>(), 0_u64..40).prop_map(|(parent, count)| stored(parent, count)),
        removed,
        below(),
        Just(KvEvent::Cleared),
        any::<u64>().prop_map(|parent| KvEvent::LeftOut {
            parent: EngineHash(parent),
        }),
    ]
}

fn news() -> impl Strategy<Value = KvUpdate> {
    let flags = any::<(bool, bool)>();
    let message = (
        any::<(u64, u64, u16)>(),
        flags,
        prop::collection::vec(event(), 0..6),
    )
        .prop_map(|((seq, mark, part), (is_last, is_after_loss), events)| {
            KvUpdate::Message(KvMessage {
                seq,
                mark,
                part,
                is_last,
                is_after_loss,
                events,
            })
        });
    let refuse = any::<(u32, u32)>()
        .prop_map(|(engine, router)| KvUpdate::Refuse(KvRejection::BlockSize { engine, router }));
    prop_oneof![
        message,
        any::<Option<u64>>().prop_map(|seq| KvUpdate::Current { seq }),
        refuse,
    ]
}

proptest! {
    #[test]
    fn kv_events_round_trip(rank: u16, news in news()) {
        let envelope = envelope(vec![item(rank, news)]);
        let decoded = decode_envelope(&encode_envelope(&envelope));
        prop_assert_eq!(decoded.expect("it was encoded"), envelope);
    }

    #[test]
    fn foreign_bytes_never_panic(
        rank: u16,
        news in news(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode_envelope(&envelope(vec![item(rank, news)]));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let length = cut.index(bytes.len() + 1);
        for bytes in [&bytes[..], &bytes[..length]] {
            if let Ok(envelope) = decode_envelope(bytes)
                && let Command::Batch { items, .. } = &envelope.command
            {
                // Applying it is total, whatever it contains.
                let mut driver = common::Driver::new();
                driver.apply(1, Command::PutBackend(common::spec("a", 1, None)));
                let mut items = items.clone();
                for item in &mut items {
                    if let Item::KvEvents(batch) = item {
                        batch.backend = driver.state.backend("a").expect("it was put").handle;
                    }
                }
                driver.apply(1, common::batch(items));
                prop_assert_eq!(driver.state.check(), Ok(()));
            }
        }
    }
}
