//! Tests that read the published events with another implementation of ZeroMQ.

use api::engines::kv_transport::wire::{self, EngineEvent};
use bytes::Bytes;
use serde_json::json;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket};

use super::*;
use crate::engine::offload::OffloadOptions;
use crate::engine::tests::ask;
use crate::engine::{EmulatedEngine, EngineHandle, EngineOptions};

async fn engine(form: EventEncoding, faults: &str) -> EngineHandle {
    EmulatedEngine::start(EngineOptions {
        speed: 1000.0,
        events: Some(EventsOptions {
            events: ([127, 0, 0, 1], 0).into(),
            replay: Some(([127, 0, 0, 1], 0).into()),
            form,
            faults: faults.parse().unwrap_or_default(),
        }),
        ..EngineOptions::default()
    })
    .await
    .unwrap()
}

async fn complete(engine: &EngineHandle, prompt: &str, salt: &str) {
    let body = json!({
        "model": "emulated", "prompt": prompt, "max_tokens": 1, "cache_salt": salt,
    });
    let (status, _) = ask(engine, "POST", "/v1/completions", body).await;
    assert_eq!(status, 200);
}

/// Returns the topic, the sequence number and the events of a message.
fn read(frames: &[Bytes]) -> (String, u64, Vec<EngineEvent>) {
    let [.., topic, seq, payload] = frames else {
        panic!("{} frames", frames.len());
    };
    let seq = u64::from_be_bytes(seq[..].try_into().unwrap());
    let topic = String::from_utf8(topic.to_vec()).unwrap();
    let events = match payload.is_empty() {
        true => Vec::new(),
        false => wire::decode(payload).unwrap().events,
    };
    (topic, seq, events)
}

/// Returns all messages that the engine replays from a sequence number on.
async fn replay(engine: &EngineHandle, from: u64) -> Vec<(u64, Vec<EngineEvent>)> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&engine.kv_replay().unwrap()).await.unwrap();
    let start = Bytes::copy_from_slice(&from.to_be_bytes());
    dealer
        .send(vec![Bytes::new(), start].try_into().unwrap())
        .await
        .unwrap();
    let mut messages = Vec::new();
    loop {
        let (_, seq, events) = read(&dealer.recv().await.unwrap().into_vec());
        if seq == u64::MAX {
            return messages;
        }
        messages.push((seq, events));
    }
}

#[tokio::test]
async fn a_zeromq_library_reads_both_event_encodings() {
    for form in [EventEncoding::Array, EventEncoding::Map] {
        let engine = engine(form, "").await;
        let mut subscriber = SubSocket::new();
        subscriber
            .connect(&engine.kv_events().unwrap())
            .await
            .unwrap();
        subscriber.subscribe("").await.unwrap();
        // Subscriptions are not acknowledged: the first received message is where this one begins.
        let prompt = "a".repeat(128 * 3);
        let mut number = 0;
        let (topic, seq, events) = loop {
            complete(&engine, &format!("{number:0128}{prompt}"), "salt").await;
            number += 1;
            let soon = std::time::Duration::from_millis(100);
            if let Ok(message) = tokio::time::timeout(soon, subscriber.recv()).await {
                break read(&message.unwrap().into_vec());
            }
        };
        assert_eq!((topic.as_str(), seq < number), ("kv-events", true));
        let [EngineEvent::Stored(stored)] = &events[..] else {
            panic!("{events:?}");
        };
        assert_eq!((stored.hashes.len(), stored.tokens.len()), (4, 128));
        assert_eq!((stored.block_size, stored.parent), (32, None));
        assert_eq!(stored.tokens[32..], [u32::from_le_bytes(*b"aaaa"); 96]);
        let salt = (form == EventEncoding::Map).then_some("salt");
        assert_eq!(stored.keys.salt.as_deref(), salt);
        let replayed = replay(&engine, seq).await;
        assert_eq!(replayed[0], (seq, events));
        engine.stop().await;
    }
}

#[tokio::test]
async fn events_of_tiers_follow_those_of_the_gpu_in_a_message() {
    for is_described in [false, true] {
        let engine = EmulatedEngine::start(EngineOptions {
            speed: 1000.0,
            offload: OffloadOptions {
                cpu_blocks: 64,
                is_described,
                ..OffloadOptions::default()
            },
            events: Some(EventsOptions {
                events: ([127, 0, 0, 1], 0).into(),
                replay: Some(([127, 0, 0, 1], 0).into()),
                form: EventEncoding::Map,
                faults: PublisherFaults::default(),
            }),
            ..EngineOptions::default()
        });
        let engine = engine.await.unwrap();
        complete(&engine, &"a".repeat(256), "").await;
        let replayed = replay(&engine, 0).await;
        let stored = replayed[0].1.iter().map(|event| match event {
            EngineEvent::Stored(stored) => (stored.hashes.len(), stored.tokens.len()),
            other => panic!("{other:?}"),
        });
        let expected = match is_described {
            false => vec![(2, 64), (2, 0)],
            true => vec![(2, 64), (1, 32), (1, 32)],
        };
        assert_eq!(stored.collect::<Vec<_>>(), expected);
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_cache_reset_is_published_with_the_next_step() {
    let engine = engine(EventEncoding::Map, "").await;
    complete(&engine, &"a".repeat(256), "").await;
    let (status, _) = ask(&engine, "POST", "/reset_prefix_cache", json!(null)).await;
    assert_eq!(status, 200);
    assert_eq!(replay(&engine, 0).await.len(), 1);
    complete(&engine, &"b".repeat(256), "").await;
    let replayed = replay(&engine, 1).await;
    assert!(
        matches!(&replayed[..], [(1, events)] if matches!(events[..], [EngineEvent::Cleared, EngineEvent::Stored(_)])),
        "{replayed:?}"
    );
    let body = json!({ "model": "emulated", "prompt": "b".repeat(600) });
    let (_, found) = ask(&engine, "POST", "/debug/prefix", body).await;
    assert_eq!(found, json!({ "blocks": 2, "cached_hashes": 2 }));
    engine.stop().await;
}

#[tokio::test]
async fn a_restart_begins_a_new_event_stream() {
    let engine = engine(EventEncoding::Map, "restart-after=2").await;
    for number in 0..3 {
        complete(&engine, &format!("{number}").repeat(256), "").await;
    }
    let replayed = replay(&engine, 0).await;
    assert_eq!(replayed.len(), 1);
    assert_eq!(replayed[0].0, 0);
    let (_, sources) = ask(&engine, "GET", "/kv_event_sources", json!(null)).await;
    let port = engine
        .kv_events()
        .unwrap()
        .rsplit_once(':')
        .unwrap()
        .1
        .to_owned();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{port}"));
    engine.stop().await;
}
