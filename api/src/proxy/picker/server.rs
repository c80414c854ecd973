//! The picker's listener: accepts connections of gateways, serves gRPC on them with or without TLS,
//! and drains.

use std::error::Error;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::HeaderValue;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Picker;
use super::service::PickerService;
use crate::engines::backends::pool::prepare;
use crate::net::bounded_listener::{BoundedConnection, BoundedListener, ConnectionPlace};
use crate::net::http2_preface::greeted;
use crate::net::tls::{self, ServerConfig};
use crate::proxy::DrainResult;

/// Maximum number of gateway connections. Each carries many streams.
const CONNECTIONS_MAX: usize = 1024;
/// Time after the start of a drain within which a new connection must complete its TLS handshake
/// and send the HTTP/2 preface.
const DRAIN_GRACE: Duration = Duration::from_millis(250);
/// HTTP/2 flow-control window of a stream, in bytes. Prompts can be long.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// HTTP/2 flow-control window of a connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Returns the TLS config for a new connection.
pub type PickerTls = Box<dyn Fn() -> Arc<ServerConfig> + Send + Sync>;

/// An endpoint picker with its listener.
pub struct PickerServer {
    listener: TcpListener,
    picker: Arc<Picker>,
    /// Source of the TLS config; `None` for plain text.
    tls: Option<PickerTls>,
}

impl PickerServer {
    /// Creates a server that serves nothing before [`PickerServer::run_until`].
    #[must_use]
    pub fn new(listener: TcpListener, picker: Picker, tls: Option<PickerTls>) -> Self {
        Self {
            listener,
            picker: Arc::new(picker),
            tls,
        }
    }

    /// Serves until `drain` is cancelled. Then accepts only backlogged connections, lets all
    /// streams finish, and closes the rest at the deadline. `deadline` is called when the drain
    /// begins.
    #[must_use]
    pub fn run_until(
        self,
        drain: CancellationToken,
        deadline: Box<dyn Fn() -> Duration + Send + Sync>,
    ) -> BoxFuture<'static, DrainResult> {
        self.serve(drain, deadline).boxed()
    }

    async fn serve(
        self,
        drain: CancellationToken,
        deadline: Box<dyn Fn() -> Duration + Send + Sync>,
    ) -> DrainResult {
        let Self {
            listener,
            picker,
            tls,
        } = self;
        let connections = TaskTracker::new();
        let cut = CancellationToken::new();
        let listener = BoundedListener::new(listener, CONNECTIONS_MAX, "gateways");
        let serve = |accepted: BoundedConnection| {
            let connection = GatewayConnection {
                picker: Arc::clone(&picker),
                tls: tls.as_ref().map(|current| current()),
                peer: accepted.peer.ip().to_canonical(),
                drain: drain.clone(),
                cut: cut.clone(),
                place: accepted.place,
            };
            connections.spawn(connection.serve(accepted.stream));
        };
        loop {
            tokio::select! {
                biased;
                () = drain.cancelled() => break,
                accepted = listener.accept() => serve(accepted),
            }
        }
        while let Some(accepted) = listener.accept_waiting() {
            serve(accepted);
        }
        drop(listener);
        connections.close();
        let _: Result<(), _> = timeout(deadline(), connections.wait()).await;
        let left = connections.len();
        cut.cancel();
        connections.wait().await;
        // The streams end with their connections. Their charges must be recorded before the outbox
        // is emptied.
        picker.tasks.close();
        picker.tasks.wait().await;
        DrainResult { cut: left }
    }
}

/// Whether a connection failed because the gateway's protocol or certificate is not the expected.
fn is_mismatch(error: &tls::TlsAcceptError) -> bool {
    match error {
        tls::TlsAcceptError::Clear => true,
        tls::TlsAcceptError::Handshake(error) => error.kind() == io::ErrorKind::InvalidData,
    }
}

/// A connection from a gateway.
struct GatewayConnection {
    picker: Arc<Picker>,
    /// TLS config; `None` for plain text.
    tls: Option<Arc<ServerConfig>>,
    peer: IpAddr,
    drain: CancellationToken,
    cut: CancellationToken,
    place: ConnectionPlace,
}

impl GatewayConnection {
    async fn serve(self, stream: TcpStream) {
        let open = &self.picker.metrics.connections;
        open.inc();
        tokio::select! {
            biased;
            () = self.cut.cancelled() => {}
            () = self.speak(stream) => {}
        }
        open.dec();
    }

    async fn speak(&self, stream: TcpStream) {
        let timeouts = self.picker.proxy.settings.timeouts;
        let greeted = async {
            prepare(&stream, timeouts.keep_alive)?;
            greeted(stream, self.tls.clone()).await
        };
        let greeted = tokio::select! {
            biased;
            greeted = timeout(timeouts.first_request, greeted) => greeted,
            () = self.has_lingered() => return,
            () = self.place.told_to_leave() => return,
        };
        let stream = match greeted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                self.failed(&error);
                return;
            }
            Err(_) => return,
        };
        // A gateway holds its connections, and may use each at any time.
        let _busy = self.place.busy();
        let builder = self.builder();
        let stream = TokioIo::new(stream);
        let mut connection = pin!(builder.serve_connection(stream, self.service()));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = self.drain.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(peer = %self.peer, %error, "gateway's connection ended");
        }
    }

    /// Logs why a connection ended before it was used: as a warning, once a minute per address, if
    /// the gateway and this listener do not fit together. Health checks by TCP just close theirs.
    fn failed(&self, error: &tls::TlsAcceptError) {
        let peer = self.peer;
        let suppressed = is_mismatch(error).then(|| self.picker.mismatches.try_acquire(peer));
        let error: &(dyn Error + 'static) = match error {
            tls::TlsAcceptError::Handshake(error) => error,
            error => error,
        };
        match suppressed.flatten() {
            None => tracing::debug!(%peer, error, "gateway's connection ended"),
            Some(suppressed) => tracing::warn!(
                %peer,
                error,
                suppressed,
                "a gateway cannot connect to listen.picker: check tls.picker and the gateway's TLS"
            ),
        }
    }

    /// Waits for the start of a drain and then for [`DRAIN_GRACE`].
    async fn has_lingered(&self) {
        self.drain.cancelled().await;
        sleep(DRAIN_GRACE).await;
    }

    fn builder(&self) -> http2::Builder<TokioExecutor> {
        let proxy = &self.picker.proxy;
        let (limits, timeouts) = (proxy.limits.load(), &proxy.settings.timeouts);
        let streams_max = limits.requests().saturating_add(limits.reading());
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            // Of no use in gRPC.
            .auto_date_header(false)
            .max_concurrent_streams(u32::try_from(streams_max).unwrap_or(u32::MAX))
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .keep_alive_interval(timeouts.keep_alive)
            .keep_alive_timeout(timeouts.keep_alive);
        builder
    }

    fn service(&self) -> PickerService {
        let peer = HeaderValue::from_str(&self.peer.to_string());
        PickerService {
            picker: Arc::clone(&self.picker),
            peer: peer.expect("an address is visible ascii"),
            drain: self.drain.clone(),
        }
    }
}
