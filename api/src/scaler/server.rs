//! The scaler's listener: accepts KEDA's connections and serves gRPC on them, with or without TLS.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Scaler;
use super::externalscaler::external_scaler_server::ExternalScalerServer;
use super::service::ScalerService;
use crate::engines::backends::pool::prepare;
use crate::net::bounded_listener::{BoundedConnection, BoundedListener};
use crate::net::http2_preface::greeted;
use crate::net::tls::ServerConfig;

/// Maximum number of connections. KEDA's operator and its metrics server have one each.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of calls at once on a connection.
const CALLS_MAX: u32 = 128;
/// Maximum length of a request, in bytes: the metadata of a trigger.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Time within which a connection completes its TLS handshake and sends the HTTP/2 preface.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// Interval of probes of a connection on which nothing happens.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Time for calls to end when the replica stops.
const STOP_MAX: Duration = Duration::from_millis(250);

/// Returns the TLS config for a new connection.
pub type ScalerTls = Box<dyn Fn() -> Arc<ServerConfig> + Send + Sync>;

/// Serves `scaler` at `listener` until `stop`. `tls` is the source of TLS configs; `None` for plain
/// text.
pub async fn serve(
    listener: TcpListener,
    scaler: Scaler,
    tls: Option<ScalerTls>,
    stop: CancellationToken,
) {
    let listener = BoundedListener::new(listener, CONNECTIONS_MAX, "scalers");
    loop {
        let Some(accepted) = stop.run_until_cancelled(listener.accept()).await else {
            return;
        };
        let service = ScalerService {
            scaler: scaler.clone(),
            stop: stop.clone(),
        };
        let tls = tls.as_ref().map(|current| current());
        tokio::spawn(async move {
            let peer = accepted.peer;
            if let Err(error) = serve_connection(accepted, service, tls).await {
                tracing::debug!(%peer, error = %error, "a scaler's connection ended");
            }
        });
    }
}

async fn serve_connection(
    accepted: BoundedConnection,
    service: ScalerService,
    tls: Option<Arc<ServerConfig>>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let BoundedConnection { stream, place, .. } = accepted;
    let stop = service.stop.clone();
    prepare(&stream, KEEP_ALIVE)?;
    let greeted = tokio::select! {
        biased;
        greeted = timeout(GREETING_MAX, greeted(stream, tls)) => greeted??,
        () = stop.cancelled() => return Ok(()),
        () = place.told_to_leave() => return Ok(()),
    };
    // A scaler holds its connection, and may use it at any time.
    let _busy = place.busy();
    let server = ExternalScalerServer::new(service).max_decoding_message_size(REQUEST_BYTES_MAX);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(CALLS_MAX)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let stream = TokioIo::new(greeted);
    let service = TowerToHyperService::new(server);
    let mut connection = pin!(builder.serve_connection(stream, service));
    tokio::select! {
        biased;
        ended = connection.as_mut() => ended?,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            timeout(STOP_MAX, connection).await??;
        }
    }
    Ok(())
}
