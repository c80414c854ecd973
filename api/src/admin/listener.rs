//! The admin listener: how many connections it accepts, and how long it waits for a request.
//!
//! Operators, probes and scrapers share it. A client that opens connections without sending a
//! complete request takes one of few places, and not for long.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::gate::CallerAddress;
use super::{Admin, STREAMS_MAX, router};
use crate::backends::pool::prepare;

/// Maximum number of open connections, including event streams. Others wait in the listener's
/// backlog.
const CONNECTIONS_MAX: usize = STREAMS_MAX + 32;
/// Longest time from the start of a connection, or the end of an answer, to the next complete head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum length of a head, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Maximum number of header fields.
const HEADERS_MAX: usize = 64;
/// Interval of TCP keep-alive probes: a reader of events may have vanished silently.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Pause after a failed accept. The usual cause, a lack of descriptors, does not end at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the admin API until `stop`, then until all requests in progress are answered.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>, stop: CancellationToken) {
    let router = router(admin);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let open = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = accept(&listener, &places) => accepted,
        };
        match accepted {
            Ok((stream, peer, place)) => {
                let (router, stop) = (router.clone(), stop.clone());
                open.spawn(async move {
                    converse((stream, peer), router, stop).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    open.close();
    open.wait().await;
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await;
    let place = place.map_err(|_| io::Error::other("the semaphore is never closed"))?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, place))
}

async fn converse(
    (stream, peer): (TcpStream, SocketAddr),
    router: Router,
    stop: CancellationToken,
) {
    if let Err(error) = prepare(&stream, KEEP_ALIVE) {
        tracing::debug!(%error, "connection closed before it was served");
        return;
    }
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX);
    let service = router.map_request(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(CallerAddress(peer));
        request
    });
    let service = TowerToHyperService::new(service);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
