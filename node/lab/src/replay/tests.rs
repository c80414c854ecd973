//! Loads on emulated engines, without a router in between.

use std::cell::Cell;
use std::time::Duration;

use super::chats::{Chats, ChatsOptions};
use super::load::{LoadPlan, LoadSource, run};
use super::targets::Targets;
use super::text::PromptSpec;
use super::trace::Arrival;
use crate::engine::{EmulatedEngine, EngineHandle, EngineOptions};

async fn engines(count: usize) -> (Vec<EngineHandle>, Targets) {
    let mut engines = Vec::new();
    for _ in 0..count {
        let options = EngineOptions {
            speed: 10_000.0,
            ..EngineOptions::default()
        };
        engines.push(EmulatedEngine::start(options).await.unwrap());
    }
    let urls: Vec<String> = engines.iter().map(EngineHandle::url).collect();
    (engines, Targets::new(&urls).unwrap())
}

fn plan(work: LoadSource<'_>) -> LoadPlan<'_> {
    LoadPlan {
        work,
        model: "emulated".to_owned(),
        speed: 1e6,
        in_flight_max: 8,
        timeout: Duration::from_secs(60),
    }
}

/// Returns requests of two full blocks of 128 bytes and a partial one. All share the first block.
fn arrivals(count: u64) -> Vec<Arrival> {
    let arrival = |number| Arrival {
        at: Duration::from_secs(number),
        user: "u".into(),
        session: [None, None],
        model: None,
        prompt: PromptSpec {
            ids: vec![0, number, 7],
            block_bytes: 128,
            bytes: 300,
            seed: 0,
        },
        output_tokens: 4,
    };
    (1..=count).map(arrival).collect()
}

#[tokio::test]
async fn a_replayed_trace_is_answered_and_counted_like_the_engines() {
    let (engines, targets) = engines(2).await;
    let calls = Cell::new(0);
    let report = run(plan(LoadSource::Trace(arrivals(40))), &targets, |_| {
        calls.set(calls.get() + 1);
    })
    .await;
    assert_eq!(
        (report.total.ok, report.total.failed, calls.get()),
        (40, 0, 40)
    );
    assert_eq!(report.total.prompt_tokens, 40 * 75);
    assert_eq!(report.total.completion_tokens, 40 * 4);
    assert_eq!(report.total.predicted_hit_rate, None);
    let hits: u64 = engines.iter().map(|engine| engine.stats().cache_hits).sum();
    assert_eq!(report.total.cached_tokens, Some(hits));
    assert!(report.targets.values().all(|target| target.ok == 20));
}

#[tokio::test]
async fn a_chat_finds_its_last_turn_in_the_cache() {
    let (_engines, targets) = engines(1).await;
    let mut chats = Chats::new(ChatsOptions {
        chats: 1,
        turns: 5,
        ..ChatsOptions::default()
    });
    let first = run(
        plan(LoadSource::Chats {
            chats: &mut chats,
            requests: 1,
        }),
        &targets,
        |_| {},
    )
    .await;
    assert_eq!((first.total.ok, first.total.cached_tokens), (1, Some(0)));
    let next = run(
        plan(LoadSource::Chats {
            chats: &mut chats,
            requests: 4,
        }),
        &targets,
        |_| {},
    )
    .await;
    assert_eq!(next.total.ok, 4);
    // All but the newest message and a partial block.
    assert!(next.total.hit_rate.unwrap() > 0.8, "{:?}", next.total);
}

#[tokio::test]
async fn failures_are_counted_by_kind_and_downed_targets_as_lost() {
    let (engines, targets) = engines(2).await;
    let wrong = LoadPlan {
        model: "other".to_owned(),
        ..plan(LoadSource::Trace(arrivals(4)))
    };
    let report = run(wrong, &targets, |_| {}).await;
    assert_eq!(report.errors["status 404"].count, 4);
    let mut engines = engines.into_iter();
    engines.next().unwrap().stop().await;
    let report = run(plan(LoadSource::Trace(arrivals(4))), &targets, |_| {}).await;
    assert_eq!((report.total.ok, report.errors["connect"].count), (2, 2));
    targets.set_up(0, false);
    let report = run(plan(LoadSource::Trace(arrivals(4))), &targets, |_| {}).await;
    assert_eq!((report.total.ok, report.total.failed), (4, 0));
}

#[tokio::test]
async fn requests_in_flight_on_a_downed_target_count_as_lost() {
    let options = EngineOptions {
        speed: 0.001,
        ..EngineOptions::default()
    };
    let engine = EmulatedEngine::start(options).await.unwrap();
    let targets = Targets::new(&[engine.url()]).unwrap();
    let take_down = async {
        let mut open = engine.watch_open();
        open.wait_for(|open| *open == 1).await.unwrap();
        targets.set_up(0, false);
        engine.stop().await;
    };
    let load = run(plan(LoadSource::Trace(arrivals(1))), &targets, |_| {});
    let (report, ()) = tokio::join!(load, take_down);
    assert_eq!((report.total.lost, report.total.failed), (1, 0));
}
