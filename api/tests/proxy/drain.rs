//! Stopping: what has begun is finished, nothing else is begun.

use std::sync::Arc;
use std::time::Duration;

use api::proxy::Drained;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

#[tokio::test]
async fn draining_finishes_streams_closes_idle_connections_and_accepts_nothing() {
    let gate = Arc::new(Semaphore::new(0));
    let stream = vec![
        stream_head(),
        chunk(&delta("a", 1)),
        Step::Await(gate.clone()),
        chunk(DONE),
        last_chunk(),
    ];
    let engine = Engine::start(move |n| {
        if n == 0 {
            vec![json("200 OK", "{}")]
        } else {
            stream.clone()
        }
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut idle = fleet.client().await;
    assert_eq!(idle.ask(chat("")).await.status, 200);
    let mut streaming = fleet.client().await;
    streaming.send(chat(",\"stream\":true")).await;
    streaming.read_until("\"a\"").await;
    fleet.drain.cancel();
    assert!(idle.is_closed().await);
    assert!(TcpStream::connect(fleet.address).await.is_err());
    assert_eq!(fleet.running(), 1);
    gate.add_permits(1);
    let answer = streaming.answer().await;
    assert!(answer.is_complete && answer.body.ends_with(DONE));
    assert!(streaming.is_closed().await);
    fleet.is_idle().await;
    assert_eq!(fleet.server.await.unwrap(), Drained { cut: 0 });
}

#[tokio::test]
async fn what_is_not_finished_at_the_deadline_is_cut() {
    let engine = Engine::always(vec![stream_head(), chunk(&delta("a", 1)), Step::Hang]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::from_millis(20), |_| {}).await;
    let mut client = fleet.client().await;
    client.send(chat(",\"stream\":true")).await;
    client.read_until("\"a\"").await;
    fleet.drain.cancel();
    assert!(!client.answer().await.is_complete);
    eventually("the engine is left", || engine.abandoned() == 1).await;
    fleet.is_idle().await;
    assert_eq!(fleet.server.await.unwrap(), Drained { cut: 1 });
}
