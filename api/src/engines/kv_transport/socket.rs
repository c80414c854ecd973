//! A reader's two sockets as streams: the subscription, which never ends, and a replay, which does.
//!
//! Each runs in its own task behind a short queue, so that a delayed reader slows down the peer
//! instead of filling this replica's memory. The transport is a port, [`Sockets`], implemented by
//! [`Zmq`] and by simulations.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::endpoint::{KvAddress, ListeningSide};
use super::zmtp::{SocketType, ZmtpConnection, ZmtpError};
use crate::engines::backends::EngineDialer;
use crate::engines::backends::pool::prepare;
use crate::ports::BoxFuture;

/// Maximum number of messages queued for the reader.
const QUEUE_MESSAGES_MAX: usize = 256;
/// Maximum time to wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// Interval of TCP keep-alive probes.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// First and longest pause between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Maximum silence of an engine before a replay. vLLM checks for replay requests ten times a second.
const REPLAY_SILENCE_MAX: Duration = Duration::from_secs(3);
/// Maximum silence of an engine within a replay. A ROUTER socket drops what exceeds its queue, even
/// the message that ends the replay.
const REPLAY_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Message number that ends a replay.
const REPLAY_END: u64 = u64::MAX;

/// An event of a subscription or replay.
#[derive(Debug)]
pub enum SocketMessage {
    /// The subscription is established.
    Connected,
    /// A message with its sequence number.
    Message(u64, Bytes),
    /// The replay is complete.
    End,
    /// The subscription broke and will be retried, or the replay ended too soon.
    Broke(String),
}

/// Transport to the engines' publishers.
pub trait Sockets: Send + Sync + 'static {
    /// Subscribes to everything that an engine publishes at `address`. Reconnects whenever the
    /// connection breaks, until the receiver of `queue` is dropped.
    fn subscribe(
        &self,
        side: ListeningSide,
        address: KvAddress,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, ()>;

    /// Requests all messages from number `from` on and queues them. Returns a description of the
    /// fault if they are incomplete.
    fn replay(
        &self,
        address: KvAddress,
        from: u64,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, Result<(), String>>;
}

/// Transport over ZeroMQ, with TCP and Unix sockets.
#[derive(Debug, Clone, Default)]
pub struct Zmq(EngineDialer);

impl Zmq {
    /// Creates a transport that connects to engines through `dialer`.
    #[must_use]
    pub fn new(dialer: EngineDialer) -> Self {
        Self(dialer)
    }
}

impl Sockets for Zmq {
    fn subscribe(
        &self,
        side: ListeningSide,
        address: KvAddress,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, ()> {
        let dialer = self.0.clone();
        Box::pin(async move {
            match side {
                ListeningSide::Engine => subscribe_by_dialling(&dialer, &address, &queue).await,
                ListeningSide::Here => subscribe_by_listening(&address, &queue).await,
            }
        })
    }

    fn replay(
        &self,
        address: KvAddress,
        from: u64,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, Result<(), String>> {
        let dialer = self.0.clone();
        Box::pin(async move {
            let replayed = replay(&dialer, &address, from, &queue).await;
            replayed.map_err(|error| error.to_string())
        })
    }
}

/// Queue of a socket's task. Dropping it closes the socket.
pub(crate) struct Socket {
    incoming: mpsc::Receiver<SocketMessage>,
    _task: AbortOnDropHandle<()>,
}

impl Socket {
    /// Subscribes to everything that an engine publishes at `address`. Reconnects whenever the
    /// connection breaks.
    pub(crate) fn subscription(
        sockets: &dyn Sockets,
        side: ListeningSide,
        address: KvAddress,
    ) -> Self {
        let (queue, incoming) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let task = tokio::spawn(sockets.subscribe(side, address, queue));
        Self {
            incoming,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Requests all messages from number `from` on.
    pub(crate) fn replay(sockets: &dyn Sockets, address: KvAddress, from: u64) -> Self {
        let (queue, incoming) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let replayed = sockets.replay(address, from, queue.clone());
        let task = tokio::spawn(async move {
            let last = match replayed.await {
                Ok(()) => SocketMessage::End,
                Err(why) => SocketMessage::Broke(why),
            };
            // If this fails, the receiver is gone.
            drop(queue.send(last).await);
        });
        Self {
            incoming,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Returns the next event of the socket; `None` if its task has ended.
    pub(crate) async fn next(&mut self) -> Option<SocketMessage> {
        self.incoming.recv().await
    }
}

async fn dial(
    dialer: &EngineDialer,
    address: &KvAddress,
    kind: SocketType,
) -> Result<ZmtpConnection, ZmtpError> {
    let connecting = async {
        match address {
            KvAddress::Ipc(path) => {
                ZmtpConnection::open(dialer.reach_socket(path).await?, kind).await
            }
            KvAddress::Tcp { host, port } => {
                let host = host.as_deref().unwrap_or("localhost");
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let stream = dialer.reach_at(host, *port).await?;
                prepare(&stream, KEEP_ALIVE)?;
                ZmtpConnection::open(stream, kind).await
            }
        }
    };
    match timeout(CONNECT_MAX, connecting).await {
        Ok(connected) => connected,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

async fn subscribe_by_dialling(
    dialer: &EngineDialer,
    address: &KvAddress,
    queue: &mpsc::Sender<SocketMessage>,
) {
    let mut pause = PAUSES.0;
    loop {
        let error = match dial(dialer, address, SocketType::Sub).await {
            Ok(mut connection) => {
                pause = PAUSES.0;
                pass_on(&mut connection, queue).await
            }
            Err(error) => error,
        };
        if queue
            .send(SocketMessage::Broke(error.to_string()))
            .await
            .is_err()
        {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Listens at `address` and follows the engine that connected last: an older connection belongs to
/// an earlier process.
async fn subscribe_by_listening(address: &KvAddress, queue: &mpsc::Sender<SocketMessage>) {
    let KvAddress::Tcp { host, port } = address else {
        let why = "an engine can dial tcp:// only".to_owned();
        drop(queue.send(SocketMessage::Broke(why)).await);
        return;
    };
    let host = host.as_deref().unwrap_or("0.0.0.0");
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let listener = loop {
        match TcpListener::bind((host, *port)).await {
            Ok(listener) => break listener,
            Err(error) => {
                let why = format!("listen on {address}: {error}");
                if queue.send(SocketMessage::Broke(why)).await.is_err() {
                    return;
                }
                sleep(PAUSES.1).await;
            }
        }
    };
    let mut dialled: Option<ZmtpConnection> = None;
    let mut greeted: Option<PendingHandshake> = None;
    loop {
        match served_until_newer(&listener, dialled.as_mut(), &mut greeted, queue).await {
            Ok(newer) => dialled = Some(newer),
            Err(error) => {
                dialled = None;
                if queue
                    .send(SocketMessage::Broke(error.to_string()))
                    .await
                    .is_err()
                {
                    return;
                }
            }
        }
    }
}

/// A connection during its handshake.
type PendingHandshake = BoxFuture<'static, Result<ZmtpConnection, ZmtpError>>;

/// Forwards messages from `dialled` until it breaks or a newer engine has connected. A peer that
/// connects and stays silent does not delay others.
async fn served_until_newer(
    listener: &TcpListener,
    dialled: Option<&mut ZmtpConnection>,
    greeted: &mut Option<PendingHandshake>,
    queue: &mpsc::Sender<SocketMessage>,
) -> Result<ZmtpConnection, ZmtpError> {
    let served = async {
        match dialled {
            Some(connection) => pass_on(connection, queue).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(served);
    loop {
        let greeting = async {
            match greeted.as_mut() {
                Some(greeting) => greeting.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            error = &mut served => return Err(error),
            opened = greeting => {
                *greeted = None;
                if opened.is_ok() {
                    return opened;
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if prepare(&stream, KEEP_ALIVE).is_ok() => {
                    *greeted = Some(Box::pin(ZmtpConnection::open(stream, SocketType::Sub)));
                }
                Ok(_) => {}
                Err(_) => sleep(PAUSES.0).await,
            }
        }
    }
}

/// Subscribes and queues messages until the connection breaks. Returns why it broke.
async fn pass_on(
    connection: &mut ZmtpConnection,
    queue: &mpsc::Sender<SocketMessage>,
) -> ZmtpError {
    if let Err(error) = connection.subscribe_to_all().await {
        return error;
    }
    if queue.send(SocketMessage::Connected).await.is_err() {
        return ZmtpError::Closed;
    }
    loop {
        let message = match connection.receive().await {
            Ok(frames) => read(&frames),
            Err(error) => return error,
        };
        let Some((seq, payload)) = message else {
            return ZmtpError::Message("it has no number");
        };
        if queue
            .send(SocketMessage::Message(seq, payload))
            .await
            .is_err()
        {
            return ZmtpError::Closed;
        }
    }
}

async fn replay(
    dialer: &EngineDialer,
    address: &KvAddress,
    from: u64,
    queue: &mpsc::Sender<SocketMessage>,
) -> Result<(), ZmtpError> {
    let mut connection = dial(dialer, address, SocketType::Dealer).await?;
    connection.send(&[b"", &from.to_be_bytes()]).await?;
    let mut silence_max = REPLAY_SILENCE_MAX;
    loop {
        let received = connection.pending_bytes();
        let Ok(frames) = timeout(silence_max, connection.receive()).await else {
            if connection.pending_bytes() > received {
                continue;
            }
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        };
        silence_max = REPLAY_PAUSE_MAX;
        let frames = frames?;
        match read(&frames) {
            Some((REPLAY_END, _)) => return Ok(()),
            Some((seq, payload)) => {
                if queue
                    .send(SocketMessage::Message(seq, payload))
                    .await
                    .is_err()
                {
                    return Ok(());
                }
            }
            None => return Err(ZmtpError::Message("it has no number")),
        }
    }
}

/// Returns the number and the payload of a message, which are its last two frames. The number of
/// frames before them depends on the engine's version. Returns `None` if it has no such frames.
fn read(frames: &[Bytes]) -> Option<(u64, Bytes)> {
    let [.., seq, payload] = frames else {
        return None;
    };
    let seq = u64::from_be_bytes(seq[..].try_into().ok()?);
    Some((seq, payload.clone()))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    async fn numbers(socket: &mut Socket, count: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        while numbers.len() < count {
            if let Some(SocketMessage::Message(seq, _)) = socket.next().await {
                numbers.push(seq);
            }
        }
        numbers
    }

    async fn dial_in(port: u16) -> TcpStream {
        loop {
            match TcpStream::connect(("127.0.0.1", port)).await {
                Ok(stream) => return stream,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    #[tokio::test]
    async fn a_dialling_engine_is_read_despite_a_silent_one() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let host = Some("127.0.0.1".to_owned());
        let mut socket = Socket::subscription(
            &Zmq::default(),
            ListeningSide::Here,
            KvAddress::Tcp { host, port },
        );
        let mut engine = ZmtpConnection::open(dial_in(port).await, SocketType::Pub)
            .await
            .unwrap();
        assert_eq!(&engine.receive().await.unwrap()[0][..], b"\x01");
        engine.send(&[b"", &[0; 8], b"a"]).await.unwrap();
        assert_eq!(numbers(&mut socket, 1).await, [0]);
        let _silent = dial_in(port).await;
        engine
            .send(&[b"", &1_u64.to_be_bytes(), b"b"])
            .await
            .unwrap();
        assert_eq!(numbers(&mut socket, 1).await, [1]);
        // A restarted engine replaces the previous one.
        let mut next = ZmtpConnection::open(dial_in(port).await, SocketType::Pub)
            .await
            .unwrap();
        next.receive().await.unwrap();
        next.send(&[b"", &[0; 8], b"c"]).await.unwrap();
        assert_eq!(numbers(&mut socket, 1).await, [0]);
    }
}
