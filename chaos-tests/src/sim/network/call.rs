//! Both sides of a call, and the transport through which replicas make and accept calls.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use raft::{ConnectError, PeerChannel, PeerRequest, PeerResponse, PeerService, Transport};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;

use super::body::{BodyPiece, BodyWindow, WholeBody, stream};
use super::packet::{BodyPart, CallAnswer, CallSide, Packet, is_answer_stream, is_request_stream};
use super::{SimConnection, SimNetwork, broken, host_of};

/// Interval at which a closing listener checks for calls in flight.
const CLOSE_LOOK: Duration = Duration::from_millis(10);

/// Response or error that the client of a call receives.
type CallReply = Result<(http::response::Parts, Body), Status>;

/// State of a call in flight, on both sides.
pub(super) struct Call {
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) connection: u64,
    pub(super) request_window: BodyWindow,
    answer_window: BodyWindow,
    /// Sender of the response; `None` once the call is answered.
    reply: Option<oneshot::Sender<CallReply>>,
    to_client: Option<UnboundedSender<BodyPiece>>,
    to_server: Option<UnboundedSender<BodyPiece>>,
    server: Vec<AbortHandle>,
    is_stream: bool,
    is_client_over: bool,
    is_server_over: bool,
    /// Times at which the last packet in each direction arrives.
    last_due: [u64; 2],
}

impl Call {
    pub(super) fn last_due(&mut self, side: CallSide) -> &mut u64 {
        &mut self.last_due[usize::from(side == CallSide::Server)]
    }

    pub(super) fn is_stream(&self) -> bool {
        self.is_stream
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_client_over && self.is_server_over
    }

    /// Ends one side of the call, because its connection is gone or the client dropped the call.
    pub(super) fn end(&mut self, side: CallSide) {
        match side {
            CallSide::Client => {
                if let Some(reply) = self.reply.take() {
                    // The client may have dropped the call.
                    let _gone = reply.send(Err(broken()));
                }
                if let Some(pieces) = self.to_client.take() {
                    let _gone = pieces.send(BodyPiece::Broken(broken()));
                }
                self.is_client_over = true;
                self.request_window.close();
            }
            CallSide::Server => {
                if let Some(pieces) = self.to_server.take() {
                    let _gone = pieces.send(BodyPiece::Broken(broken()));
                }
                for task in self.server.drain(..) {
                    task.abort();
                }
                self.is_server_over = true;
                self.answer_window.close();
            }
        }
    }

    /// Records that a task of the server handles the call.
    pub(super) fn served(&mut self, pieces: Option<UnboundedSender<BodyPiece>>, task: AbortHandle) {
        self.to_server = self.to_server.take().or(pieces);
        self.server.push(task);
    }

    /// Delivers the head of the response, or the error, to the client.
    pub(super) fn answered(&mut self, answer: CallAnswer) {
        let Some(reply) = self.reply.take() else {
            return;
        };
        let reply_is = match answer {
            CallAnswer::Is(head, BodyPart::Whole(whole)) => {
                self.is_client_over = true;
                self.is_server_over = true;
                self.request_window.close();
                Ok((*head, whole.into_body()))
            }
            CallAnswer::Is(head, BodyPart::Pieces) => {
                let (pieces, body) = stream(self.answer_window.clone());
                self.to_client = Some(pieces);
                Ok((*head, body))
            }
            CallAnswer::Broken(status) => {
                self.is_client_over = true;
                self.is_server_over = true;
                Err(status)
            }
        };
        // The client may have dropped the call.
        let _gone = reply.send(reply_is);
    }

    /// Delivers a piece of a body to `side`.
    pub(super) fn piece(&mut self, side: CallSide, piece: BodyPiece) {
        let is_last = !matches!(piece, BodyPiece::Frame(_));
        let pieces = match side {
            CallSide::Client => &mut self.to_client,
            CallSide::Server => &mut self.to_server,
        };
        if let Some(to) = pieces {
            // The reader may have stopped.
            let _gone = to.send(piece);
        }
        if is_last {
            *pieces = None;
            if side == CallSide::Client {
                self.is_client_over = true;
                self.is_server_over = true;
            }
        }
    }
}

/// Guard that, when dropped, ends the client's side of a call and cancels the call at its server.
struct CancelGuard {
    network: SimNetwork,
    call: u64,
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        let mut state = self.network.lock();
        let Some(call) = state.calls.get_mut(&self.call) else {
            return;
        };
        if call.is_client_over {
            return;
        }
        call.end(CallSide::Client);
        let (from, to, call) = (call.from, call.to, self.call);
        state.send(from, to, Packet::Cancel { call });
    }
}

/// A response body that keeps its call alive until it is dropped.
struct HeldBody {
    body: Body,
    _interest: CancelGuard,
}

impl http_body::Body for HeldBody {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Status>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }
}

impl SimNetwork {
    /// Makes one call over a connection and waits for the response.
    async fn call(self, connection: u64, request: PeerRequest) -> Result<PeerResponse, Status> {
        let (head, body) = request.into_parts();
        let (whole, pieces) = match is_request_stream(head.uri.path()) {
            true => (None, Some(body)),
            false => (Some(WholeBody::read(body).await?), None),
        };
        let window = BodyWindow::new();
        let (call, reply) = self.begin(connection, head, whole, window.clone())?;
        let interest = CancelGuard {
            network: self.clone(),
            call,
        };
        if let Some(body) = pieces {
            tokio::spawn(pump(self, call, CallSide::Server, body, window));
        }
        let (head, body) = reply.await.map_err(|_| broken())??;
        let held = HeldBody {
            body,
            _interest: interest,
        };
        Ok(PeerResponse::from_parts(head, Body::new(held)))
    }

    fn begin(
        &self,
        connection: u64,
        head: http::request::Parts,
        body: Option<WholeBody>,
        request_window: BodyWindow,
    ) -> Result<(u64, oneshot::Receiver<CallReply>), Status> {
        let mut state = self.lock();
        state.is_usable(connection)?;
        let it = &state.connections[&connection];
        let (from, to, connection_run) = (it.from, it.to, it.to_run);
        let (reply, answered) = oneshot::channel();
        let call = state.next_id();
        let begun = Call {
            from,
            to,
            connection,
            request_window,
            answer_window: BodyWindow::new(),
            reply: Some(reply),
            to_client: None,
            to_server: None,
            server: Vec::new(),
            is_stream: body.is_none() || is_answer_stream(head.uri.path()),
            is_client_over: false,
            is_server_over: false,
            last_due: [0; 2],
        };
        state.calls.insert(call, begun);
        let request = Packet::Request {
            call,
            to,
            connection_run,
            head: Box::new(head),
            body,
            is_repeat: false,
        };
        state.send(from, to, request);
        Ok((call, answered))
    }

    /// Sends the server's response and returns the window of its body; `None` if the call is over.
    fn respond(&self, call: u64, answer: CallAnswer) -> Option<BodyWindow> {
        let mut state = self.lock();
        let it = state.calls.get(&call)?;
        let (from, to, window) = (it.from, it.to, it.answer_window.clone());
        let answer = Box::new(answer);
        state.send(to, from, Packet::Response { call, answer });
        Some(window)
    }

    /// Sends a piece of a body to `side`. Returns `false` if the call is over.
    fn send_piece(&self, call: u64, side: CallSide, piece: BodyPiece) -> bool {
        let mut state = self.lock();
        let Some(it) = state.calls.get(&call) else {
            return false;
        };
        let (from, to) = match side {
            CallSide::Server => (it.from, it.to),
            CallSide::Client => (it.to, it.from),
        };
        state.send(from, to, Packet::Piece { call, side, piece });
        true
    }

    async fn connect(self, from: u8, from_run: u64, to: u8) -> Result<PeerChannel, ConnectError> {
        let (opened, is_open) = oneshot::channel();
        let connection = {
            let mut state = self.lock();
            let connection = state.next_id();
            let opening = SimConnection {
                from,
                from_run,
                to,
                to_run: None,
                is_broken: false,
                silent: None,
                opened: Some(opened),
            };
            state.connections.insert(connection, opening);
            state.send(from, to, Packet::Open { connection });
            connection
        };
        is_open.await.map_err(|_| "connection reset".to_owned())??;
        let network = self;
        Ok(PeerChannel::new(tower::service_fn(move |request| {
            network.clone().call(connection, request)
        })))
    }
}

/// Sends a body in pieces, as fast as the other side reads it.
async fn pump(network: SimNetwork, call: u64, side: CallSide, mut body: Body, window: BodyWindow) {
    while window.take().await {
        let piece = match body.frame().await {
            Some(Ok(frame)) => BodyPiece::Frame(frame),
            Some(Err(status)) => BodyPiece::Broken(status),
            None => BodyPiece::End,
        };
        let is_last = !matches!(piece, BodyPiece::Frame(_));
        if !network.send_piece(call, side, piece) || is_last {
            return;
        }
    }
}

/// Handles one call at its server and sends the response.
pub(super) async fn answer(
    network: SimNetwork,
    call: u64,
    in_pieces: bool,
    served: impl Future<Output = Result<PeerResponse, Infallible>> + Send,
) {
    let Ok(response) = served.await;
    let (head, body) = response.into_parts();
    if in_pieces {
        if let Some(window) =
            network.respond(call, CallAnswer::Is(Box::new(head), BodyPart::Pieces))
        {
            pump(network, call, CallSide::Client, body, window).await;
        }
        return;
    }
    network.respond(
        call,
        match WholeBody::read(body).await {
            Ok(whole) => CallAnswer::Is(Box::new(head), BodyPart::Whole(whole)),
            Err(status) => CallAnswer::Broken(status),
        },
    );
}

/// Transport of one run of a replica over the simulated network.
pub struct SimTransport {
    network: SimNetwork,
    id: u8,
    run: u64,
}

impl SimTransport {
    pub(super) fn new(network: SimNetwork, id: u8, run: u64) -> Self {
        Self { network, id, run }
    }
}

impl Transport for SimTransport {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, self.id], 7000))
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        let (network, from, run) = (self.network.clone(), self.id, self.run);
        Box::pin(async move {
            let to = host_of(&address).ok_or_else(|| format!("no host at {address}"))?;
            network.connect(from, run, to).await
        })
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        let (network, id, run) = (self.network.clone(), self.id, self.run);
        Box::pin(async move {
            let listen = |service| {
                let mut state = network.lock();
                if let Some(host) = state.hosts.get_mut(&id)
                    && host.run == run
                {
                    host.service = service;
                }
            };
            listen(Some(service));
            stop.cancelled().await;
            listen(None);
            let is_busy = || {
                let state = network.lock();
                let mut calls = state.calls.values();
                calls.any(|call| call.to == id && !call.server.is_empty())
            };
            while is_busy() {
                tokio::time::sleep(CLOSE_LOOK).await;
            }
            Ok(())
        })
    }
}
