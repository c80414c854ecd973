//! Servers of the publisher's PUB and ROUTER sockets.

use std::sync::Arc;
use std::time::Duration;

use api::engines::kv_transport::zmtp::{SocketType, ZmtpConnection, ZmtpError};
use bytes::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Publisher, PublisherFaults, TOPIC};

/// Sequence number of the message that ends a replay; its payload is empty.
const REPLAY_END: [u8; 8] = [0xff; 8];

/// Serves subscribers at the PUB socket until `stop` is cancelled.
pub(super) async fn subscribers(
    listener: TcpListener,
    publisher: Arc<Publisher>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let serving = |socket| subscriber(socket, publisher.clone());
    serve_each(listener, stop, tasks, serving).await;
}

/// Serves replays at the ROUTER socket until `stop` is cancelled.
pub(super) async fn replays(
    listener: TcpListener,
    publisher: Arc<Publisher>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let serving = |socket| replay(socket, publisher.clone());
    serve_each(listener, stop, tasks, serving).await;
}

/// Serves each connection in its own task until `stop` is cancelled.
async fn serve_each<F>(
    listener: TcpListener,
    stop: CancellationToken,
    tasks: TaskTracker,
    serving: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = Result<(), ZmtpError>> + Send + 'static,
{
    loop {
        let serving = serving(accept(&listener).await);
        tasks.spawn(stop.clone().run_until_cancelled_owned(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%error, "peer left");
            }
        }));
    }
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => {
                // Nagle's algorithm would delay each message until the previous one is
                // acknowledged.
                if socket.set_nodelay(true).is_ok() {
                    return socket;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accept subscriber");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Waits until a peer subscribes to a prefix of the topic, then sends it all further messages.
async fn subscriber(socket: TcpStream, publisher: Arc<Publisher>) -> Result<(), ZmtpError> {
    let mut connection = ZmtpConnection::open(socket, SocketType::Pub).await?;
    loop {
        let frames = connection.receive().await?;
        let topic = frames.first().and_then(|frame| frame.strip_prefix(b"\x01"));
        if topic.is_some_and(|topic| TOPIC.as_bytes().starts_with(topic)) {
            break;
        }
    }
    let mut messages = publisher.subscribe();
    let stall = publisher.stall();
    let mut sent = 0;
    loop {
        let message = tokio::select! {
            message = messages.recv() => message.ok_or(ZmtpError::Closed)?,
            frames = connection.receive() => {
                // Ignore everything after the subscription, except a disconnect.
                frames?;
                continue;
            }
        };
        if let Some(stall) = stall
            && PublisherFaults::stalls_at(sent)
        {
            tokio::time::sleep(stall).await;
        }
        sent += 1;
        let seq = message.seq.to_be_bytes();
        connection
            .send(&[TOPIC.as_bytes(), &seq, &message.payload])
            .await?;
    }
}

async fn replay(socket: TcpStream, publisher: Arc<Publisher>) -> Result<(), ZmtpError> {
    let mut connection = ZmtpConnection::open(socket, SocketType::Router).await?;
    loop {
        let frames = connection.receive().await?;
        let from = frames.last().and_then(|frame| frame.first_chunk::<8>());
        let Some(from) = from.copied().map(u64::from_be_bytes) else {
            continue;
        };
        let envelope: Vec<Bytes> = frames[..frames.len() - 1].to_vec();
        for message in publisher.from(from) {
            answer(
                &mut connection,
                &envelope,
                &message.seq.to_be_bytes(),
                &message.payload,
            )
            .await?;
        }
        answer(&mut connection, &envelope, &REPLAY_END, b"").await?;
    }
}

async fn answer(
    connection: &mut ZmtpConnection,
    envelope: &[Bytes],
    seq: &[u8],
    payload: &[u8],
) -> Result<(), ZmtpError> {
    let mut frames: Vec<&[u8]> = envelope.iter().map(|frame| &frame[..]).collect();
    frames.extend([TOPIC.as_bytes(), seq, payload]);
    connection.send(&frames).await
}
