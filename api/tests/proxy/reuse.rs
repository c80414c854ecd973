//! When connections to engines are used again, and what becomes of requests that race with an
//! engine that closes one.

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk};
use super::fleet::Fleet;

/// Returns a streamed answer after which an engine promises to keep the connection.
fn kept_stream() -> Vec<Step> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: keep-alive\r\n\
                keep-alive: timeout=5, max=100\r\ntransfer-encoding: chunked\r\n\r\n";
    vec![
        Step::Send(head.into()),
        chunk(&delta("a", 1)),
        chunk(DONE),
        last_chunk(),
    ]
}

/// Starts an engine that closes its connection after each stream, as llama.cpp does: at once, or
/// when the next request is already there.
async fn closing_engine() -> Engine {
    Engine::start(|number| {
        let end = match number % 2 {
            0 => Step::CloseUnread,
            _ => Step::Close,
        };
        [kept_stream(), vec![end]].concat()
    })
    .await
}

/// Sends `count` requests for a stream, one at a time, and returns how many were not answered.
async fn ask(fleet: &Fleet, count: usize) -> usize {
    let mut client = fleet.client().await;
    let mut failed = 0;
    for _ in 0..count {
        let answer = client.ask(chat(",\"stream\":true")).await;
        failed += usize::from(answer.status != 200 || !answer.is_complete);
    }
    failed
}

#[tokio::test]
async fn an_engine_that_closes_after_each_stream_breaks_no_request() {
    for clients in [1, 6] {
        let engine = closing_engine().await;
        let fleet = std::sync::Arc::new(Fleet::start(&[&engine]).await);
        let mut asking = JoinSet::new();
        for _ in 0..clients {
            let fleet = std::sync::Arc::clone(&fleet);
            asking.spawn(async move { ask(&fleet, 504 / clients).await });
        }
        let failed: usize = asking.join_all().await.into_iter().sum();
        assert_eq!(failed, 0, "of 504, {clients} at once");
        assert_eq!(engine.requests().len(), 504, "each is run once");
        let reused = fleet.metrics.pool.reused.get();
        assert!(reused <= clients as u64, "reused {reused} times");
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn an_engine_that_keeps_connections_gets_no_others() {
    let engine = Engine::always(kept_stream()).await;
    let fleet = Fleet::start(&[&engine]).await;
    assert_eq!(ask(&fleet, 100).await, 0);
    assert_eq!(engine.connections(), 1);
    assert_eq!(fleet.metrics.pool.reused.get(), 99);
}

#[tokio::test]
async fn a_request_left_unread_is_sent_over_a_new_connection() {
    // The second one exceeds what the engine's host takes before the engine reads.
    for bytes in [1, 16 << 20] {
        let engine = Engine::start(|number| match number {
            0 => vec![json("200 OK", "{}"), Step::CloseUnread],
            _ => vec![json("200 OK", "{}")],
        })
        .await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        assert_eq!(client.ask(chat("")).await.status, 200);
        let long = format!(",\"user\":\"{}\"", "u".repeat(bytes));
        assert_eq!(client.ask(chat(&long)).await.status, 200, "{bytes} bytes");
        assert_eq!((engine.requests().len(), engine.connections()), (2, 2));
        assert_eq!(fleet.metrics.pool.reset.get(), 1);
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_request_left_unread_by_an_engine_that_ended_fails() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = Engine::at(listener.local_addr().unwrap());
    let ending = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read(&mut [0; 64 * 1024]).await.unwrap();
        assert!(length > 0);
        let Step::Send(answer) = json("200 OK", "{}") else {
            unreachable!()
        };
        tokio::io::AsyncWriteExt::write_all(&mut stream, &answer)
            .await
            .unwrap();
        // The next request, or the close of an unused connection, arrives without being read.
        stream.readable().await.unwrap();
        drop(listener);
    });
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 200);
    let answer = client.ask(chat("")).await;
    answer.refuses(502, "backend_broke");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    ending.await.unwrap();
    fleet.is_idle().await;
}
