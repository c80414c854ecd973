//! Accepts connections, serves HTTP/1.1 and HTTP/2 on them with or without TLS, and drains.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use prometheus_client::metrics::gauge::Gauge;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answer_body::AnswerBody;
use super::write_timeout::{CurrentResponse, WriteTimeoutSocket};
use crate::base::log_rate_limit::LogRateLimit;
use crate::engines::backends::pool::prepare;
use crate::error::{ProxyError, openai_body};
use crate::net::connections::{ClientConnection, ConnectionGuard};
use crate::net::tls::{
    self, Certificates, ClearRejection, ListenerFiles, MaybeTls, ServerConfig, TlsAcceptError,
};
use crate::proxy::Proxy;
use crate::proxy::request::headers::CLOSE;

/// Interval for checking idle connections to engines.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which connections stay open after the drain has begun, for requests that are already in
/// transit. At most a quarter of the deadline.
const DRAIN_GRACE: Duration = Duration::from_millis(250);
/// Pause after a failed accept. The usual cause, a lack of descriptors, persists for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Interval in which at most one log line reports failed accepts.
const ACCEPT_TOLD_EVERY: Duration = Duration::from_secs(10);
/// HTTP/2 flow-control window of a connection and of a stream, in bytes. Prompts can be long.
const H2_WINDOW_BYTES: u32 = 1024 * 1024;
/// Number of idle connections closed at a time to make room.
const EVICTED_AT_ONCE: usize = 32;
/// Interval between attempts to close idle connections while there is no room.
const EVICT_EVERY: Duration = Duration::from_millis(100);
/// Time for an evicted connection to close.
const EVICTED_WITHIN: Duration = Duration::from_secs(1);

/// Response to a client that sends plain HTTP to a TLS port.
static NO_TLS: LazyLock<ClearRejection> = LazyLock::new(|| ClearRejection {
    content_type: "application/json",
    body: openai_body(&ProxyError::BadRequest {
        message: "this port requires TLS; use https://".to_owned(),
        param: None,
    }),
});

/// A data plane with its listener.
pub struct Server {
    listener: TcpListener,
    proxy: Arc<Proxy>,
    leaving: CancellationToken,
    tls: Option<Arc<Certificates<ListenerFiles>>>,
}

/// Result of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainResult {
    /// Number of connections that were still open at the deadline and were closed.
    pub cut: usize,
}

impl Server {
    /// Creates a server. Until [`Server::run`], connections wait in the listener's backlog.
    #[must_use]
    pub fn new(listener: TcpListener, proxy: Arc<Proxy>) -> Self {
        Self {
            listener,
            proxy,
            leaving: CancellationToken::new(),
            tls: None,
        }
    }

    /// Serves TLS only, if `tls` is set. A connection uses the certificates that are current when
    /// it begins.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<Certificates<ListenerFiles>>>) -> Self {
        Self { tls, ..self }
    }

    /// Sets `leaving`. After it is cancelled, every HTTP/1.1 response has `connection: close`, so
    /// clients switch to another replica before their connection is closed. Connections are still
    /// accepted and served.
    #[must_use]
    pub fn leaving(self, leaving: CancellationToken) -> Self {
        Self { leaving, ..self }
    }

    /// Serves until `drain` is cancelled. Then stops accepting and lets every connection finish
    /// what it has begun, while `connection: close` and GOAWAY send clients elsewhere. Closes what
    /// is left after `deadline`.
    #[must_use]
    pub fn run(
        self,
        drain: CancellationToken,
        deadline: Duration,
    ) -> BoxFuture<'static, DrainResult> {
        self.run_until(drain, Box::new(move || deadline))
    }

    /// Serves like [`Server::run`], with the deadline that `deadline` returns when the drain
    /// begins. A call at the start determines the grace period of the drain.
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
            proxy,
            leaving,
            tls,
        } = self;
        let tracker = TaskTracker::new();
        let stop = ShutdownSignals {
            leaving,
            drain,
            drain_grace: DRAIN_GRACE.min(deadline() / 4),
            cut: CancellationToken::new(),
        };
        let mut door = Acceptor {
            listener,
            room: Arc::new(Semaphore::new(
                proxy.settings.limits.connections_max as usize,
            )),
            pending: None,
        };
        let builder = Arc::new(builder(&proxy));
        let failures = LogRateLimit::new(1, ACCEPT_TOLD_EVERY);
        let mut reap = interval(REAP_INTERVAL);
        reap.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let context = || ConnectionContext {
            proxy: Arc::clone(&proxy),
            builder: Arc::clone(&builder),
            stop: stop.clone(),
            tls: tls.as_ref().map(|tls| tls.current()),
        };
        loop {
            tokio::select! {
                biased;
                () = stop.drain.cancelled() => break,
                _ = reap.tick() => proxy.pool.reap(),
                accepted = door.accept(&proxy) => match accepted {
                    Ok(Some(accepted)) => { tracker.spawn(context().serve(accepted)); }
                    Ok(None) => {}
                    Err(error) => {
                        if let Some(suppressed) = failures.try_acquire() {
                            tracing::warn!(%error, suppressed, "accept failed");
                        }
                        proxy.close_idle(EVICTED_AT_ONCE);
                        proxy.pool.close_idle();
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // Closing the listener resets the connections in its backlog.
        while let Some(Ok(accepted)) = door.accept(&proxy).now_or_never() {
            accepted.map(|accepted| tracker.spawn(context().serve(accepted)));
        }
        drop(door);
        tracker.close();
        let deadline = deadline();
        // Requests that still wait for a backend are refused, so that clients can go elsewhere.
        let reject_before = REJECT_BEFORE_DEADLINE.min(deadline / 4);
        let finished = timeout(deadline.saturating_sub(reject_before), tracker.wait()).await;
        if finished.is_err() {
            proxy.admission.reject_all();
            // The tracker shows what is left.
            let _: Result<(), _> = timeout(reject_before, tracker.wait()).await;
        }
        let cut = tracker.len();
        stop.cut.cancel();
        tracker.wait().await;
        // The tasks end with their connections. Their charges must be recorded before the outbox is
        // emptied.
        proxy.tasks.close();
        proxy.tasks.wait().await;
        DrainResult { cut }
    }
}

/// Listener that accepts connections within the limit.
struct Acceptor {
    listener: TcpListener,
    room: Arc<Semaphore>,
    /// Connection accepted before there was room for it; `None` if no connection waits.
    pending: Option<(TcpStream, IpAddr)>,
}

/// A client's connection with its guard and permit.
struct Accepted {
    stream: TcpStream,
    peer: IpAddr,
    seated: ConnectionGuard,
    _room: OwnedSemaphorePermit,
}

impl Acceptor {
    /// Returns the next connection; `None` if its address has reached its limit. Closes the longest
    /// idle connections while there is no room. Cancellation safe.
    async fn accept(&mut self, proxy: &Proxy) -> io::Result<Option<Accepted>> {
        if self.pending.is_none() {
            let (stream, peer) = self.listener.accept().await?;
            self.pending = Some((stream, peer.ip().to_canonical()));
        }
        let room = self.room(proxy).await?;
        let Some((stream, peer)) = self.pending.take() else {
            return Ok(None);
        };
        let trusted = &proxy.settings.trusted_proxies;
        let is_exempt = trusted.iter().any(|prefix| prefix.contains(peer));
        let Some(seated) = proxy.clients.register(peer, is_exempt) else {
            proxy.metrics.connections_refused.inc();
            return Ok(None);
        };
        Ok(Some(Accepted {
            stream,
            peer,
            seated,
            _room: room,
        }))
    }

    async fn room(&self, proxy: &Proxy) -> io::Result<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() {
            return Ok(permit);
        }
        loop {
            proxy.close_idle(EVICTED_AT_ONCE);
            let permit = timeout(EVICT_EVERY, Arc::clone(&self.room).acquire_owned()).await;
            if let Ok(permit) = permit {
                return permit.map_err(|_| io::Error::other("the semaphore is never closed"));
            }
        }
    }
}

/// Executor that spawns h2 streams on a tracker for which the drain waits.
#[derive(Clone)]
struct TrackedExecutor(TaskTracker);

impl<F> Executor<F> for TrackedExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

fn builder(proxy: &Proxy) -> auto::Builder<TrackedExecutor> {
    let (limits, timeouts) = (&proxy.settings.limits, &proxy.settings.timeouts);
    let mut builder = auto::Builder::new(TrackedExecutor(proxy.tasks.clone()));
    builder
        .http1()
        .timer(TokioTimer::new())
        .half_close(false)
        .header_read_timeout(timeouts.next_request)
        .max_headers(limits.headers_max)
        .max_buf_size(limits.head_bytes_max);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.head_bytes_max).unwrap_or(u32::MAX))
        .max_concurrent_streams(limits.streams_per_connection_max)
        .initial_stream_window_size(H2_WINDOW_BYTES)
        .initial_connection_window_size(H2_WINDOW_BYTES)
        .keep_alive_interval(timeouts.keep_alive)
        .keep_alive_timeout(timeouts.keep_alive);
    builder
}

/// Time before a drain's deadline at which waiting requests are refused.
const REJECT_BEFORE_DEADLINE: Duration = Duration::from_millis(500);

/// Signals for the steps of a shutdown.
#[derive(Clone)]
struct ShutdownSignals {
    /// Cancelled when clients should go to other replicas.
    leaving: CancellationToken,
    /// Cancelled when connections should finish what they have begun.
    drain: CancellationToken,
    /// Cancelled when all connections should close.
    cut: CancellationToken,
    /// Time for which a connection without a request may still send one after `drain`.
    drain_grace: Duration,
}

impl ShutdownSignals {
    /// Whether clients should use another replica.
    fn is_leaving(&self) -> bool {
        self.leaving.is_cancelled() || self.drain.is_cancelled()
    }
}

/// Context for serving a connection.
struct ConnectionContext {
    proxy: Arc<Proxy>,
    builder: Arc<auto::Builder<TrackedExecutor>>,
    stop: ShutdownSignals,
    /// TLS config; `None` for plain text.
    tls: Option<Arc<ServerConfig>>,
}

impl ConnectionContext {
    /// Prepares a socket, and performs the TLS handshake if there are certificates.
    async fn secure(
        &self,
        stream: TcpStream,
        client: &ClientConnection,
        asked: &ConnectionRequests,
    ) -> Result<MaybeTls<WriteTimeoutSocket<TcpStream>>, TlsAcceptError> {
        let timeouts = self.proxy.settings.timeouts;
        prepare(&stream, timeouts.keep_alive)?;
        let written = asked.written.clone();
        // Below TLS, so that data buffered by TLS is timed as well.
        let timed = |stream| WriteTimeoutSocket::new(stream, timeouts.untaken, written);
        let Some(config) = self.tls.clone() else {
            return Ok(MaybeTls::Clear(timed(stream)));
        };
        let handshake = tls::accept(stream, config, &NO_TLS, timed);
        let limit = timeouts.first_request;
        // The handshake is large and short-lived, so it should not be part of a connection's
        // future.
        let secured = Box::pin(shake_hands(handshake, client, &self.stop.cut, limit));
        let secured = secured.await;
        if secured.is_err() {
            self.proxy.metrics.tls_handshakes_failed.inc();
        }
        secured
    }

    async fn serve(self, accepted: Accepted) {
        let Accepted {
            stream,
            peer,
            seated,
            _room,
        } = accepted;
        let _open = ConnectionGaugeGuard::connection(&self.proxy.metrics.connections);
        let client = Arc::clone(&seated.connection);
        let asked = Arc::new(ConnectionRequests::default());
        let stream = match self.secure(stream, &client, &asked).await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(%peer, %error, "connection ended before it was served");
                return;
            }
        };
        let (proxy, stop) = (self.proxy, self.stop);
        let timeouts = proxy.settings.timeouts;
        let service = service(&proxy, seated, peer, &asked, &stop);
        let mut connection = pin!(self.builder.serve_connection(TokioIo::new(stream), service));
        // hyper's own timer starts only once it knows the protocol, and covers only HTTP/1.1.
        let mut patience = pin!(sleep(timeouts.first_request));
        let (mut is_first, mut is_waiting, mut is_evicted) = (true, true, false);
        let ended = loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => break ended,
                () = client.told_to_leave(), if !is_evicted => {
                    (is_evicted, is_waiting) = (true, true);
                    connection.as_mut().graceful_shutdown();
                    patience.as_mut().reset(Instant::now() + EVICTED_WITHIN);
                }
                () = &mut patience, if is_waiting => {
                    if is_evicted {
                        if client.is_idle() {
                            break Ok(());
                        }
                        patience.as_mut().reset(Instant::now() + EVICTED_WITHIN);
                    } else if asked.take() {
                        is_first = false;
                        is_waiting = asked.is_h2.load(Ordering::Relaxed);
                        patience.as_mut().reset(Instant::now() + timeouts.next_request);
                    } else if is_first {
                        break Ok(());
                    } else {
                        is_waiting = false;
                        connection.as_mut().graceful_shutdown();
                    }
                }
                () = stop.drain.cancelled() => {
                    tokio::select! {
                        biased;
                        ended = connection.as_mut() => break ended,
                        () = stop.cut.cancelled() => break Ok(()),
                        () = sleep(stop.drain_grace) => connection.as_mut().graceful_shutdown(),
                    }
                    break tokio::select! {
                        biased;
                        ended = connection.as_mut() => ended,
                        () = stop.cut.cancelled() => Ok(()),
                    };
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection ended");
        }
    }
}

/// Waits for a handshake until its limit, or until the connection is evicted or cut.
async fn shake_hands<S>(
    handshake: impl Future<Output = Result<MaybeTls<S>, TlsAcceptError>>,
    client: &ClientConnection,
    cut: &CancellationToken,
    limit: Duration,
) -> Result<MaybeTls<S>, TlsAcceptError> {
    let why = tokio::select! {
        biased;
        done = handshake => return done,
        () = client.told_to_leave() => io::ErrorKind::ConnectionAborted,
        () = cut.cancelled() => io::ErrorKind::ConnectionAborted,
        () = sleep(limit) => io::ErrorKind::TimedOut,
    };
    Err(TlsAcceptError::Handshake(why.into()))
}

/// Returns the service for one connection. It passes requests to the proxy and, during shutdown,
/// asks HTTP/1.1 clients to close.
fn service(
    proxy: &Arc<Proxy>,
    seated: ConnectionGuard,
    peer: IpAddr,
    asked: &Arc<ConnectionRequests>,
    stop: &ShutdownSignals,
) -> impl Service<
    Request<Incoming>,
    Response = Response<AnswerBody>,
    Error = Infallible,
    Future: Send + 'static,
> + use<> {
    let (proxy, asked, stop) = (Arc::clone(proxy), Arc::clone(asked), stop.clone());
    let peer = HeaderValue::from_str(&peer.to_string()).expect("an address is visible ascii");
    service_fn(move |request: Request<Incoming>| {
        // HTTP/2 uses GOAWAY instead of this header.
        let can_close = request.version() <= Version::HTTP_11;
        asked.note(!can_close);
        let (proxy, peer, request_guard) =
            (Arc::clone(&proxy), peer.clone(), seated.begin_request());
        let (asked, stop) = (Arc::clone(&asked), stop.clone());
        async move {
            // Boxed, because even an idle connection reserves room for this future. Created inside,
            // because a future that is captured and awaited is stored and moved twice.
            let mut response = Box::pin(proxy.answer(peer, request_guard, request)).await;
            asked.written.is(response.body().relay());
            if can_close && stop.is_leaving() {
                response.headers_mut().insert(CONNECTION, CLOSE);
            }
            Ok::<_, Infallible>(response)
        }
    })
}

/// State of a connection's requests for its timer and its socket.
#[derive(Default)]
struct ConnectionRequests {
    has_asked: AtomicBool,
    is_h2: AtomicBool,
    written: CurrentResponse,
}

impl ConnectionRequests {
    /// Notes that a request began.
    fn note(&self, is_h2: bool) {
        self.has_asked.store(true, Ordering::Relaxed);
        self.is_h2.store(is_h2, Ordering::Relaxed);
    }

    /// Whether a request began since the last call.
    fn take(&self) -> bool {
        self.has_asked.swap(false, Ordering::Relaxed)
    }
}

/// Guard that counts a connection in its gauge until it is dropped, even on a panic.
struct ConnectionGaugeGuard(Gauge);

impl ConnectionGaugeGuard {
    fn connection(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for ConnectionGaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn future_bytes<A, B, C, D, F: Future>(_: impl Fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_requests_future_is_small() {
        let bytes = future_bytes(Proxy::answer);
        assert!(
            bytes <= 9 * 1024,
            "the future of a request has {bytes} bytes"
        );
    }
}
