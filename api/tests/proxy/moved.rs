//! Streams that leave a backend which drains or stalls, or stay there because none other takes them.

use std::sync::Arc;
use std::time::Duration;

use api::proxy::RequestOutcome;
use state::command::Command;
use tokio::sync::Semaphore;

use super::client::chat;
use super::continued::{STREAM, is_continued, next_delta, text};
use super::engine::{DONE, Engine, Step, chunk, delta, last_chunk, stream_head};
use super::fleet::{Fleet, PATIENT, eventually};

#[tokio::test]
async fn streams_leave_a_backend_that_drains_if_they_can_move() {
    for (fields, moves) in [("", true), (",\"logprobs\":true", false)] {
        let gate = Arc::new(Semaphore::new(0));
        let opened = Arc::clone(&gate);
        let script = move |request: &str| match is_continued(request) {
            true => vec![
                stream_head(),
                chunk(&next_delta("c", 8, 1)),
                chunk(DONE),
                last_chunk(),
            ],
            false => vec![
                stream_head(),
                chunk(&delta("a", 1)),
                Step::Await(Arc::clone(&gate)),
                chunk(&delta("b", 2)),
                chunk(DONE),
                last_chunk(),
            ],
        };
        let engines = [
            Engine::answering(script.clone()).await,
            Engine::answering(script).await,
        ];
        let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
        let mut client = fleet.client().await;
        client.send(chat(&format!("{STREAM}{fields}"))).await;
        client.read_until("\"a\"").await;
        let first = usize::from(engines[0].requests().is_empty());
        fleet.apply(Command::SetDraining {
            name: format!("e{first}"),
            draining: true,
            moves_streams: true,
        });
        opened.add_permits(1);
        let answer = client.answer().await;
        let expected = if moves { "ac" } else { "ab" };
        assert!(answer.body.ends_with(DONE), "{}", answer.body);
        assert_eq!(text(&answer), expected);
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
        assert_eq!(engines[1 - first].requests().len(), usize::from(moves));
        let charge = fleet.charged().await;
        assert_eq!((charge.input_uncached, charge.output), (7, 2));
    }
}

#[tokio::test]
async fn a_stream_that_no_other_backend_takes_stays_where_it_is() {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        Step::Await(gate),
        chunk(&delta("b", 2)),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    client.read_until("\"a\"").await;
    fleet.apply(Command::SetDraining {
        name: "e0".to_owned(),
        draining: true,
        moves_streams: true,
    });
    opened.add_permits(1);
    let answer = client.answer().await;
    assert_eq!(text(&answer), "ab");
    assert!(answer.body.ends_with(DONE));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 2));
}

#[tokio::test]
async fn a_stream_that_stalls_stays_if_no_other_backend_takes_it() {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        Step::Await(gate),
        chunk(&delta("b", 2)),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        settings.streams.stall = Some(Duration::from_millis(20));
    })
    .await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    client.read_until("\"a\"").await;
    let labels = || {
        let mut page = String::new();
        let mut registry = prometheus_client::registry::Registry::default();
        fleet.metrics.register(&mut registry);
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        page
    };
    let counted = "streams_broken_total{cause=\"stalled\",result=\"no-backend\"} 1";
    eventually("no other backend was found", || labels().contains(counted)).await;
    opened.add_permits(1);
    let answer = client.answer().await;
    assert_eq!(text(&answer), "ab");
    assert!(answer.body.ends_with(DONE));
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 2));
}
