//! The admin listener: limits its connections and the time to wait for a request, with or without
//! TLS.
//!
//! Operators, probes and scrapers share it. A client that opens connections without sending a
//! complete request takes one of few places, but not for long.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, TryFutureExt as _};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::counter::Counter;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::certified::CallerCertificate;
use super::gate::CallerAddress;
use super::{Admin, STREAMS_MAX, router};
use api::engines::backends::pool::prepare;
use api::error::Problem;
use api::net::bounded_listener::{BoundedConnection, BoundedListener, ConnectionPlace};
use api::net::tls;
use api::net::tls::{
    CertificateFacts, Certificates, ClearRejection, ListenerFiles, MaybeTls, ServerConfig,
    TlsAcceptError,
};

/// Maximum number of open connections, including event streams. One address gets three quarters of
/// them.
const CONNECTIONS_MAX: usize = 2 * STREAMS_MAX;
/// Timeout from the start of a connection, or the end of a response, to the next complete head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum length of a head, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Maximum number of header fields.
const HEADERS_MAX: usize = 64;
/// Interval of TCP keep-alive probes: an event-stream client may have vanished silently.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Response to a client that sends plain HTTP to a TLS listener.
static NO_TLS: LazyLock<ClearRejection> = LazyLock::new(|| {
    let title = "this port requires TLS; use https://";
    let problem = Problem::new(StatusCode::BAD_REQUEST, "tls", title);
    let body = serde_json::to_vec(&problem);
    ClearRejection {
        content_type: "application/problem+json",
        body: body.expect("strings and numbers serialise").into(),
    }
});

/// Serves the admin API until `stop`, then until all requests in progress are answered. With `tls`,
/// it accepts only TLS, and each new connection uses the current certificates.
#[must_use]
pub fn serve(
    listener: TcpListener,
    admin: Arc<Admin>,
    tls: Option<Arc<Certificates<ListenerFiles>>>,
    stop: CancellationToken,
) -> BoxFuture<'static, ()> {
    serve_until(listener, admin, tls, stop).boxed()
}

async fn serve_until(
    listener: TcpListener,
    admin: Arc<Admin>,
    tls: Option<Arc<Certificates<ListenerFiles>>>,
    stop: CancellationToken,
) {
    let handshakes_failed = Counter::default();
    let metrics = Arc::clone(&admin.metrics);
    let router = router(admin);
    metrics.register(|registry| {
        registry.register(
            "quorate_admin_tls_handshakes_failed",
            "Connections to the admin listener that ended before TLS was established",
            handshakes_failed.clone(),
        );
    });
    let listener = BoundedListener::new(listener, CONNECTIONS_MAX, "operators");
    let connection = || AdminConnection {
        router: router.clone(),
        tls: tls.as_ref().map(|tls| tls.current()),
        handshakes_failed: handshakes_failed.clone(),
        stop: stop.clone(),
    };
    accept(listener, connection, &stop).await;
}

/// Serves `probes` as plain HTTP until `stop`, then until all requests in progress are answered.
#[must_use]
pub fn serve_probes(
    listener: TcpListener,
    probes: Router,
    stop: CancellationToken,
) -> BoxFuture<'static, ()> {
    let serving = async move {
        let listener = BoundedListener::new(listener, CONNECTIONS_MAX, "scrapers");
        let connection = || AdminConnection {
            router: probes.clone(),
            tls: None,
            handshakes_failed: Counter::default(),
            stop: stop.clone(),
        };
        accept(listener, connection, &stop).await;
    };
    serving.boxed()
}

async fn accept(
    listener: BoundedListener,
    connection: impl Fn() -> AdminConnection,
    stop: &CancellationToken,
) {
    let open = TaskTracker::new();
    loop {
        let BoundedConnection {
            stream,
            peer,
            place,
        } = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        open.spawn(connection().serve(stream, peer, Arc::new(place)));
    }
    drop(listener);
    open.close();
    open.wait().await;
}

/// Context for serving one connection.
struct AdminConnection {
    router: Router,
    /// TLS settings; `None` without TLS.
    tls: Option<Arc<ServerConfig>>,
    handshakes_failed: Counter,
    stop: CancellationToken,
}

impl AdminConnection {
    async fn serve(self, stream: TcpStream, peer: SocketAddr, place: Arc<ConnectionPlace>) {
        let secured = tokio::select! {
            biased;
            secured = self.secure(stream) => secured,
            () = place.told_to_leave() => return,
        };
        let stream = match secured {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(%peer, %error, "connection ended before it was served");
                return;
            }
        };
        let shown = stream.peer_certificates().first();
        let certificate = shown.and_then(CertificateFacts::of_der);
        let certificate = certificate.map(|facts| CallerCertificate(Arc::new(facts)));
        let router = self.router;
        let seat = Arc::clone(&place);
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let busy = seat.busy();
            let request = named(request, CallerAddress(peer), certificate.clone());
            let answered = router.clone().oneshot(request);
            // The connection is busy until the response has ended, which may be a stream.
            answered.map_ok(|response| {
                response.map(|body| {
                    body.map_frame(move |frame| {
                        let _ = &busy;
                        frame
                    })
                })
            })
        });
        let service = TowerToHyperService::new(service);
        let connection = builder().serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = place.told_to_leave() => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%peer, %error, "connection ended");
        }
    }

    /// Prepares a socket and runs the TLS handshake if certificates are configured.
    async fn secure(&self, stream: TcpStream) -> Result<MaybeTls<TcpStream>, TlsAcceptError> {
        prepare(&stream, KEEP_ALIVE)?;
        let Some(config) = self.tls.clone() else {
            return Ok(MaybeTls::Clear(stream));
        };
        let handshake = timeout(
            HEAD_TIMEOUT,
            tls::accept(stream, config, &NO_TLS, |stream| stream),
        );
        let secured = tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(io::Error::from(io::ErrorKind::Interrupted).into()),
            secured = handshake => match secured {
                Ok(secured) => secured,
                Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            },
        };
        if secured.is_err() {
            self.handshakes_failed.inc();
        }
        secured
    }
}

/// Attaches the caller's address and certificate, if any, to a request, for the gate.
fn named(
    mut request: Request<Incoming>,
    address: CallerAddress,
    certificate: Option<CallerCertificate>,
) -> Request<Incoming> {
    let extensions = request.extensions_mut();
    extensions.insert(address);
    if let Some(certificate) = certificate {
        extensions.insert(certificate);
    }
    request
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX);
    builder
}
