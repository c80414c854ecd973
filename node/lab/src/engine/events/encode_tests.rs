//! Tests of the encoded events: their bytes, and that they add up to an engine's caches.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use rmp::Marker;
use rmp::decode as unpack;
use serde_json::{Value, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::*;
use crate::engine::model::{ComputeJob, EngineShape, Finish, Scheduler};
use crate::engine::offload::OffloadOptions;
use crate::engine::text::Sequence;

const SOURCE: EventSource = EventSource {
    block_tokens: 2,
    rank: 3,
    media: OffloadMedia::Vllm,
};

fn content(tokens: &[u32]) -> BlockContent {
    BlockContent {
        tokens: tokens.to_vec(),
        salt: "salt".to_owned(),
        adapter: "poet".to_owned(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn events_of_the_gpu_have_these_bytes() {
    let events = || StepEvents {
        blocks: vec![
            BlockEvent::Removed { hash: 7 },
            BlockEvent::Stored {
                hashes: vec![300, 1 << 40],
                parent: None,
            },
            BlockEvent::Cleared,
        ],
        contents: vec![content(&[1, 2, 3, 70_000])],
        offloaded: Vec::new(),
    };
    assert_eq!(
        hex(&payload(EventEncoding::Array, SOURCE, 1.5, events())),
        "93cb3ff80000000000009393ac426c6f636b52656d6f7665649107a347505598ab426c6f636b53746f726564\
         92cd012ccf0000010000000000c094010203ce0001117002c0a3475055a4706f657491b0416c6c426c6f636b\
         73436c656172656403"
    );
    assert_eq!(
        hex(&payload(EventEncoding::Map, SOURCE, 1.5, events())),
        "93cb3ff80000000000009384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391\
         07a66d656469756da3475055a967726f75705f696478008ba474797065ab426c6f636b53746f726564ac626c\
         6f636b5f68617368657392cd012ccf0000010000000000b1706172656e745f626c6f636b5f68617368c0a974\
         6f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d65646975\
         6da3475055a96c6f72615f6e616d65a4706f6574aa65787472615f6b6579739292a4706f6574a473616c7491\
         a4706f6574a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474\
         656e74696f6e81a474797065b0416c6c426c6f636b73436c656172656403"
    );
}

/// Decodes the value at the start of `bytes`.
fn decode(bytes: &mut &[u8]) -> Value {
    let list = |length: u32, bytes: &mut &[u8]| -> Vec<Value> {
        (0..length).map(|_| decode(bytes)).collect()
    };
    match Marker::from_u8(bytes[0]) {
        Marker::Null => {
            unpack::read_nil(bytes).unwrap();
            Value::Null
        }
        Marker::F64 => json!(unpack::read_f64(bytes).unwrap()),
        Marker::FixStr(_) | Marker::Str8 => {
            let (text, rest) = unpack::read_str_from_slice(*bytes).unwrap();
            let text = json!(text);
            *bytes = rest;
            text
        }
        Marker::FixArray(_) | Marker::Array16 => {
            let length = unpack::read_array_len(bytes).unwrap();
            json!(list(length, bytes))
        }
        Marker::FixMap(_) => {
            let length = unpack::read_map_len(bytes).unwrap();
            let fields = list(2 * length, bytes);
            let name = |pair: &[Value]| pair[0].as_str().unwrap().to_owned();
            fields
                .chunks(2)
                .map(|pair| (name(pair), pair[1].clone()))
                .collect()
        }
        _ => json!(unpack::read_int::<u64, _>(bytes).unwrap()),
    }
}

fn encoded(form: EventEncoding, source: EventSource, events: StepEvents) -> Vec<Value> {
    let message = decode(&mut &payload(form, source, 0.0, events)[..]);
    message[1].as_array().unwrap().clone()
}

fn offloaded(content: Option<&BlockContent>) -> StepEvents {
    let block = |hash, parent| OffloadedBlock {
        hash,
        parent,
        content: content.cloned().map(Into::into),
    };
    StepEvents {
        offloaded: vec![
            OffloadEvent::Removed(OffloadTier::Cpu, vec![5, 6]),
            OffloadEvent::Stored(OffloadTier::Disk, vec![block(5, None), block(6, Some(4))]),
        ],
        ..StepEvents::default()
    }
}

#[test]
fn undescribed_blocks_of_a_tier_share_one_placeholder() {
    assert_eq!(
        encoded(EventEncoding::Array, SOURCE, offloaded(None)),
        [
            json!(["BlockRemoved", [5, 6], "CPU"]),
            json!(["BlockStored", [5, 6], null, [], 0, null, "STORAGE"]),
        ]
    );
    assert_eq!(
        encoded(EventEncoding::Map, SOURCE, offloaded(None)),
        [
            json!({ "type": "BlockRemoved", "block_hashes": [5, 6], "medium": "CPU", "group_idx": 0 }),
            json!({
                "type": "BlockStored", "block_hashes": [5, 6], "parent_block_hash": null,
                "token_ids": [], "block_size": 0, "lora_id": null, "medium": "STORAGE",
                "lora_name": null, "group_idx": 0,
            }),
        ]
    );
}

#[test]
fn described_blocks_of_a_tier_have_an_event_each() {
    let described = || offloaded(Some(&content(&[8, 9])));
    assert_eq!(
        encoded(EventEncoding::Array, SOURCE, described())[1..],
        [
            json!(["BlockStored", [5], null, [8, 9], 2, null, "STORAGE", "poet"]),
            json!(["BlockStored", [6], 4, [8, 9], 2, null, "STORAGE", "poet"]),
        ]
    );
    let mut second = json!({
        "type": "BlockStored", "block_hashes": [6], "parent_block_hash": 4, "token_ids": [8, 9],
        "block_size": 2, "lora_id": null, "medium": "STORAGE", "lora_name": "poet",
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    });
    let events = encoded(EventEncoding::Map, SOURCE, described());
    assert_eq!(events[2], second);
    assert_eq!(events[1].get("cache_salt"), None);
    let source = EventSource {
        media: OffloadMedia::Sglang,
        ..SOURCE
    };
    let events = encoded(EventEncoding::Map, source, described());
    assert_eq!(events[0]["medium"], "CPU_PINNED");
    assert_eq!(events[1]["cache_salt"], "salt");
    second["medium"] = json!("DISK");
    assert_eq!(events[2], second);
}

/// Blocks by medium, with their numbers of copies, as a subscriber knows them from events.
type KnownBlocks = BTreeMap<String, BTreeMap<u64, u32>>;

/// Reads an event in either form. Checks the hash of a described block against its content, which
/// has the salt `salt`.
fn follow(known: &mut KnownBlocks, event: &Value, salt: &str) {
    let names = match event[0].as_str() {
        Some("BlockRemoved") => &["type", "block_hashes", "medium"][..],
        _ => &[
            "type",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "",
            "medium",
        ],
    };
    let field = |name: &str| match event.as_array() {
        Some(fields) => &fields[names.iter().position(|it| *it == name).unwrap()],
        None => &event[name],
    };
    let medium = known.entry(field("medium").as_str().unwrap().to_owned());
    let medium = medium.or_default();
    let hashes: Vec<u64> = field("block_hashes")
        .as_array()
        .unwrap()
        .iter()
        .map(|hash| hash.as_u64().unwrap())
        .collect();
    if field("type") == "BlockRemoved" {
        for hash in hashes {
            let copies = medium.get_mut(&hash).expect("removed what was stored");
            *copies -= 1;
            medium.retain(|_, copies| *copies > 0);
        }
        return;
    }
    let tokens = field("token_ids").as_array().unwrap();
    if !tokens.is_empty() {
        let mut parent = field("parent_block_hash")
            .as_u64()
            .unwrap_or(xxh3_64(salt.as_bytes()));
        let ids = |block: &[Value]| -> Vec<u8> {
            let ids = block
                .iter()
                .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap());
            ids.flat_map(u32::to_le_bytes).collect()
        };
        let block_tokens = usize::try_from(field("block_size").as_u64().unwrap()).unwrap();
        for (block, hash) in tokens.chunks(block_tokens).zip(&hashes) {
            parent = xxh3_64_with_seed(&ids(block), parent);
            assert_eq!(parent, *hash, "a described block is what its hash says");
        }
    }
    hashes
        .iter()
        .for_each(|hash| *medium.entry(*hash).or_default() += 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn events_in_every_form_add_up_to_the_tiers(
        is_described: bool,
        is_map: bool,
        blocks in (12_u32..30, 1_u32..20, 0_u32..20),
        jobs in prop::collection::vec(
            (1_u32..40, 0_u32..40, 0_u8..3, 1_u32..8, 0_u32..5, prop::bool::weighted(0.1)),
            1..40,
        ),
    ) {
        let form = if is_map { EventEncoding::Map } else { EventEncoding::Array };
        let (num_gpu_blocks, cpu_blocks, disk_blocks) = blocks;
        let shape = EngineShape {
            num_gpu_blocks,
            block_size: 4,
            max_num_seqs: 3,
            max_num_batched_tokens: 16,
            prefill_tokens_per_s: 1000,
            decode: Duration::from_millis(1),
        };
        let options = OffloadOptions {
            cpu_blocks, disk_blocks, is_described, ..OffloadOptions::default()
        };
        let source = EventSource { block_tokens: 4, ..SOURCE };
        let mut scheduler = Scheduler::new(shape).with_offload(&options);
        let mut known = KnownBlocks::new();
        let mut run = |scheduler: &mut Scheduler, steps: u32, aborted| {
            for _ in 0..steps {
                if scheduler.begin_step().is_none() {
                    return;
                }
                if let Some(id) = aborted {
                    scheduler.abort(id);
                }
                scheduler.finish_step();
                let events = StepEvents {
                    blocks: scheduler.take_events(),
                    contents: scheduler.take_contents(),
                    offloaded: scheduler.take_offload_events(),
                };
                for event in encoded(form, source, events) {
                    follow(&mut known, &event, "salt");
                }
                for (name, tier) in [("CPU", OffloadTier::Cpu), ("STORAGE", OffloadTier::Disk)] {
                    let known = known.get(name).cloned().unwrap_or_default();
                    let held: BTreeMap<u64, u32> =
                        scheduler.tiers().hashes(tier).map(|hash| (hash, 1)).collect();
                    assert_eq!(known, held, "{name}");
                }
                let on_gpu = known.get("GPU").map_or(0, BTreeMap::len);
                assert_eq!(on_gpu, scheduler.cached_hashes());
            }
        };
        for (tokens, shared, own, max_tokens, steps, is_aborted) in jobs {
            let mut prompt = vec![0; (shared.min(tokens) * 4) as usize];
            // Some prompts end within a token.
            prompt.resize((tokens * 4) as usize - usize::from(own), own);
            let id = scheduler.submit(ComputeJob {
                sequence: Sequence::remembering(&prompt, ("", "salt"), 4, 1),
                max_tokens: max_tokens.min((num_gpu_blocks - 1) * 4 - tokens),
                ending: Finish::Length,
                adapter: None,
                is_fetched: false,
            });
            run(&mut scheduler, steps, is_aborted.then_some(id));
        }
        run(&mut scheduler, u32::MAX, None);
    }
}
