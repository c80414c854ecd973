//! Accepts connections, speaks HTTP/1.1 and h2c on them, and drains.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderValue;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Proxy;
use super::settings::ProxySettings;

/// How often idle connections to engines are looked through.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failed accept: the usual cause, no free descriptors, does not end at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// h2 flow-control window of a connection and of a stream, in bytes: prompts can be long.
const H2_WINDOW_BYTES: u32 = 1024 * 1024;

/// A data plane on its listener.
pub struct Server {
    listener: TcpListener,
    proxy: Arc<Proxy>,
}

/// How draining went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were open when the deadline came, and were cut.
    pub cut: usize,
}

impl Server {
    /// Serves nothing before [`Server::run`]; connections wait in the listener's backlog.
    #[must_use]
    pub fn new(listener: TcpListener, proxy: Arc<Proxy>) -> Self {
        Self { listener, proxy }
    }

    /// Serves until `drain` is cancelled. Then stops accepting, lets every connection finish what
    /// it has begun (`connection: close` and GOAWAY tell clients to go elsewhere), and cuts what is
    /// left after `deadline`.
    pub async fn run(self, drain: CancellationToken, deadline: Duration) -> Drained {
        let Self { listener, proxy } = self;
        let tracker = TaskTracker::new();
        let stop = Stop {
            drain,
            cut: CancellationToken::new(),
        };
        let connections = Arc::new(Semaphore::new(proxy.settings.limits.connections_max));
        let builder = Arc::new(builder(&proxy.settings));
        let mut reap = interval(REAP_INTERVAL);
        reap.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.drain.cancelled() => break,
                accepted = accept(&listener, &connections) => match accepted {
                    Ok((stream, peer, permit)) => {
                        let context = Context {
                            proxy: Arc::clone(&proxy),
                            builder: Arc::clone(&builder),
                            stop: stop.clone(),
                        };
                        tracker.spawn(context.serve(stream, peer, permit));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "accept failed");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                _ = reap.tick() => proxy.pool.reap(),
            }
        }
        drop(listener);
        tracker.close();
        // What is left shows in the tracker.
        let _: Result<(), _> = timeout(deadline, tracker.wait()).await;
        let cut = tracker.len();
        stop.cut.cancel();
        tracker.wait().await;
        Drained { cut }
    }
}

async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await;
    let permit = permit.map_err(|_| io::Error::other("the semaphore is never closed"))?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, permit))
}

fn builder(settings: &ProxySettings) -> auto::Builder<TokioExecutor> {
    let (limits, timeouts) = (&settings.limits, &settings.timeouts);
    let mut builder = auto::Builder::new(TokioExecutor::new());
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

/// The two steps of stopping.
#[derive(Clone)]
struct Stop {
    /// Finish what has begun.
    drain: CancellationToken,
    /// Do not even do that.
    cut: CancellationToken,
}

/// What serving a connection takes.
struct Context {
    proxy: Arc<Proxy>,
    builder: Arc<auto::Builder<TokioExecutor>>,
    stop: Stop,
}

impl Context {
    async fn serve(self, stream: TcpStream, peer: SocketAddr, permit: OwnedSemaphorePermit) {
        let Self {
            proxy,
            builder,
            stop,
        } = self;
        let timeouts = proxy.settings.timeouts;
        if let Err(error) = prepare(&stream, timeouts.keep_alive) {
            tracing::debug!(%error, "connection was gone before it was served");
            return;
        }
        let metrics = Arc::clone(&proxy.metrics);
        metrics.connections.inc();
        let peer = HeaderValue::from_str(&peer.ip().to_canonical().to_string())
            .expect("an address is visible ascii");
        let has_asked = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&has_asked);
        let service = service_fn(move |request| {
            asked.store(true, Ordering::Relaxed);
            let answer = Arc::clone(&proxy).answer(peer.clone(), request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        // hyper's own timer begins only when it knows which protocol is spoken.
        let mut first_request = pin!(sleep(timeouts.first_request));
        let mut is_waiting = true;
        let ended = loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => break ended,
                () = &mut first_request, if is_waiting => {
                    is_waiting = false;
                    if !has_asked.load(Ordering::Relaxed) {
                        break Ok(());
                    }
                }
                () = stop.drain.cancelled() => {
                    connection.as_mut().graceful_shutdown();
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
        metrics.connections.dec();
        drop(permit);
    }
}

fn prepare(stream: &TcpStream, keep_alive: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keep_alive = TcpKeepalive::new().with_time(keep_alive);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)
}
