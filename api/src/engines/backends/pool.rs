//! Keep-alive connections to the engines, HTTP/1.1 over TCP or TLS.
//!
//! The future that uses a connection drives it: there is no task per connection, and no channel
//! between a request and its socket. The request's future owns the connection, so dropping the
//! future or the response body closes the socket at once, which is how an engine learns that a
//! client has left. An idle connection is not driven; the pool checks whether the engine has closed
//! it when it is taken out again.
//!
//! `hyper-util`'s client also pools connections, but drives them in tasks of their own.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;
use socket2::{SockRef, TcpKeepalive};
use state::ids::BackendRef;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::NAME_HOLDS_FOR;
use super::dialer::EngineDialer;
use super::idle_connections::IdleConnections;
use super::informational::InformationalCount;
use super::local_failure::is_local;
use super::pooled_connection::PooledConnection;
pub use super::segments::Segments;
pub use super::send_error::SendError;
use super::url::{EngineUrl, EngineUrlError};

/// Maximum length of a response head, in bytes. Bodies pass through the same buffer.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of header fields in a response.
const HEADERS_MAX: usize = 128;
/// Maximum number of frames skipped at the end of a response that nobody reads.
const SKIPPED_FRAMES_MAX: usize = 16;

/// Settings of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSettings {
    /// Timeout for establishing a connection, including its TLS handshake.
    pub connect_timeout: Duration,
    /// How long an idle connection is kept. vLLM closes its side after five seconds.
    pub idle_timeout: Duration,
    /// Maximum number of idle connections per backend.
    pub idle_per_backend_max: usize,
    /// Maximum age of a connection to an engine known by a host name. Then the name is resolved
    /// again, because it may point elsewhere.
    pub name_holds_for: Duration,
    /// Interval of TCP keep-alive probes. A silently vanished engine is detected after about ten.
    pub keep_alive: Duration,
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(4),
            idle_per_backend_max: 256,
            name_holds_for: NAME_HOLDS_FOR,
            keep_alive: Duration::from_secs(20),
        }
    }
}

/// Counters of the pool's connections.
#[derive(Debug, Clone, Default)]
pub struct PoolCounters {
    /// Number of connections opened.
    pub opened: Counter,
    /// Number of requests sent over a reused connection.
    pub reused: Counter,
    /// Number of reused connections that the engine closed before it read the request, so that the
    /// request used a new one.
    pub reset: Counter,
}

/// Configures a socket: no delay, and TCP keep-alive probes every `keep_alive`.
///
/// # Errors
/// Returns an OS error, most likely because the connection is already gone.
pub fn prepare(stream: &TcpStream, keep_alive: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keep_alive = TcpKeepalive::new()
        .with_time(keep_alive)
        .with_interval(keep_alive);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)
}

/// Pool of a replica's connections to its engines.
pub struct Pool {
    settings: PoolSettings,
    counters: PoolCounters,
    dialer: EngineDialer,
    /// Endpoints by slot.
    endpoints: RwLock<Vec<Option<Arc<EngineEndpoint>>>>,
}

/// Address and idle connections of an engine.
pub struct EngineEndpoint {
    handle: BackendRef,
    url: EngineUrl,
    host: HeaderValue,
    settings: PoolSettings,
    counters: PoolCounters,
    dialer: EngineDialer,
    idle: Mutex<IdleConnections>,
}

impl Pool {
    /// Creates an empty pool.
    #[must_use]
    pub fn new(settings: PoolSettings, counters: PoolCounters) -> Self {
        Self {
            settings,
            counters,
            dialer: EngineDialer::default(),
            endpoints: RwLock::default(),
        }
    }

    /// Sets the dialer for connections to engines.
    #[must_use]
    pub fn through(self, dialer: EngineDialer) -> Self {
        Self { dialer, ..self }
    }

    /// Returns the endpoint of backend `handle`, creating it if needed. A new incarnation gets a
    /// new one, because its predecessor's connections are useless.
    ///
    /// # Errors
    /// Returns [`SendError::Url`] if `url` is not an engine URL.
    pub fn endpoint(
        &self,
        handle: BackendRef,
        url: &str,
    ) -> Result<Arc<EngineEndpoint>, SendError> {
        let index = usize::from(handle.slot.0);
        {
            let endpoints = self
                .endpoints
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(Some(endpoint)) = endpoints.get(index)
                && endpoint.handle == handle
            {
                return Ok(Arc::clone(endpoint));
            }
        }
        let endpoint = Arc::new(self.build(handle, url)?);
        let mut endpoints = self
            .endpoints
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if endpoints.len() <= index {
            endpoints.resize_with(index + 1, || None);
        }
        endpoints[index] = Some(Arc::clone(&endpoint));
        Ok(endpoint)
    }

    fn build(&self, handle: BackendRef, url: &str) -> Result<EngineEndpoint, SendError> {
        let bad_url = |why| SendError::Url(url.to_owned(), why);
        let url = EngineUrl::parse(url).map_err(bad_url)?;
        let host = url.host_header();
        Ok(EngineEndpoint {
            handle,
            host: host.ok_or_else(|| bad_url(EngineUrlError))?,
            url,
            settings: self.settings,
            counters: self.counters.clone(),
            dialer: self.dialer.clone(),
            idle: Mutex::default(),
        })
    }

    /// Closes connections that have been idle for too long. Called periodically, so that a backend
    /// without traffic does not keep sockets that its engine has closed.
    pub fn reap(&self) {
        let timeout = self.settings.idle_timeout;
        self.keep_idle(|link| link.idle_since.elapsed() < timeout);
    }

    /// Closes all idle connections to free their descriptors.
    pub fn close_idle(&self) {
        self.keep_idle(|_| false);
    }

    fn keep_idle(&self, is_kept: impl Fn(&PooledConnection) -> bool) {
        let endpoints: Vec<_> = {
            let endpoints = self
                .endpoints
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            endpoints.iter().flatten().cloned().collect()
        };
        for endpoint in endpoints {
            endpoint.idle().links.retain(|link| is_kept(link));
        }
    }
}

impl EngineEndpoint {
    /// Returns the value of the `host` header for requests to this engine.
    #[must_use]
    pub fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// Returns the number of idle connections.
    #[must_use]
    pub fn idle_connections(&self) -> usize {
        self.idle().links.len()
    }

    /// Sends the request created by `build` and waits for the response head. The request's path is
    /// appended to that of the engine's URL.
    ///
    /// Calls `build` once a connection is available. The engine may close a reused connection
    /// before it reads the request; only then is the request sent once more, over a new connection
    /// to the same engine. If a connection breaks otherwise, the request may have been run, and may
    /// even have crashed the engine.
    ///
    /// # Errors
    /// Returns a [`SendError`]; only [`SendError::Connect`] means that nothing reached the engine.
    pub async fn send(
        self: &Arc<Self>,
        build: &(impl Fn() -> Request<Segments> + Sync),
    ) -> Result<Response<EngineBody>, SendError> {
        let build = || {
            let mut request = build();
            let target = std::mem::take(request.uri_mut());
            *request.uri_mut() = self.url.locate(target);
            request
        };
        let mut unread = None;
        if let Some(link) = self.take_idle() {
            self.counters.reused.inc();
            let (idle, sent_at) = (link.idle_since.elapsed(), Instant::now());
            match self.exchange(link, build()).await {
                Ok(response) => return Ok(response),
                Err(ExchangeError::Failed(error)) => return Err(error),
                Err(ExchangeError::Unsent(_)) => {}
                Err(ExchangeError::Broke(error, link)) => {
                    if !link.left_unread(sent_at, &error).await {
                        return Err(SendError::Broke(error));
                    }
                    unread = Some(error);
                }
            }
            self.counters.reset.inc();
            self.idle().closed(idle);
        }
        let link = match (self.connect().await, unread) {
            (Ok(link), _) => link,
            // Something of the request reached the engine, so that no other one may get it.
            (Err(SendError::Connect(error)), Some(_)) if is_local(&error) => {
                return Err(SendError::NotRepeated(error));
            }
            (Err(_), Some(unread)) => return Err(SendError::Broke(unread)),
            (Err(error), None) => return Err(error),
        };
        let mut request = build();
        if !self.idle().are_kept() {
            // The side that closes first keeps the port for a minute.
            let close = HeaderValue::from_static("close");
            request.headers_mut().insert(header::CONNECTION, close);
        }
        let done = self.exchange(link, request).await;
        done.map_err(|error| match error {
            ExchangeError::Unsent(error) | ExchangeError::Broke(error, _) => {
                SendError::Broke(error)
            }
            ExchangeError::Failed(error) => error,
        })
    }

    async fn connect(&self) -> Result<Box<PooledConnection>, SendError> {
        let rules = self.dialer.rules();
        let connect = async {
            let stream = self.dialer.reach(&self.url).await?;
            prepare(&stream, self.settings.keep_alive)?;
            self.dialer.secure(&self.url, stream).await
        };
        let stream = tokio::time::timeout(self.settings.connect_timeout, connect)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(SendError::Connect)?;
        self.counters.opened.inc();
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(SendError::Broke)?;
        let now = Instant::now();
        Ok(Box::new(PooledConnection {
            sender,
            connection,
            is_over: false,
            informational: InformationalCount::default(),
            rules,
            opened_at: now,
            idle_since: now,
        }))
    }

    async fn exchange(
        self: &Arc<Self>,
        mut link: Box<PooledConnection>,
        mut request: Request<Segments>,
    ) -> Result<Response<EngineBody>, ExchangeError> {
        link.informational.watch(&mut request);
        let mut response = pin!(link.sender.try_send_request(request));
        let response = poll_fn(|cx| {
            link.drive(cx);
            if link.informational.is_exceeded() {
                return Poll::Ready(Err(SendError::Informational));
            }
            // Only `drive` makes progress on the response, and it has already registered the waker.
            match response
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
            {
                Poll::Ready(response) => Poll::Ready(Ok(response)),
                Poll::Pending if link.is_over => Poll::Ready(Err(SendError::Ended)),
                Poll::Pending => Poll::Pending,
            }
        });
        let response = match response.await.map_err(ExchangeError::Failed)? {
            Ok(response) => response,
            Err(mut error) => {
                // The request is returned if it was not taken from its queue.
                let is_unsent = error.take_message().is_some();
                let error = error.into_error();
                return Err(match is_unsent {
                    true => ExchangeError::Unsent(error),
                    false => ExchangeError::Broke(error, link),
                });
            }
        };
        let endpoint = Arc::clone(self);
        Ok(response.map(|incoming| {
            let mut body = EngineBody {
                incoming,
                link: Some(link),
                endpoint,
                ahead: VecDeque::new(),
            };
            body.settle();
            body
        }))
    }

    fn take_idle(&self) -> Option<Box<PooledConnection>> {
        loop {
            // The newest connection is the least likely to have been closed.
            let mut link = self.idle().links.pop()?;
            let idle = link.idle_since.elapsed();
            if idle < self.settings.idle_timeout && self.leads_here(&link) {
                if link.is_reusable() {
                    return Some(link);
                }
                self.idle().closed(idle);
            }
        }
    }

    /// Whether the connection still suits the engine's name and the current address rules.
    fn leads_here(&self, link: &PooledConnection) -> bool {
        let is_known =
            !self.url.is_name() || link.opened_at.elapsed() < self.settings.name_holds_for;
        is_known && link.rules == self.dialer.rules()
    }

    fn give_back(&self, mut link: Box<PooledConnection>) {
        if self.leads_here(&link) && link.is_reusable() {
            link.idle_since = Instant::now();
            let mut idle = self.idle();
            if idle.links.len() < self.settings.idle_per_backend_max {
                idle.give_back(link);
            }
        }
    }

    fn idle(&self) -> MutexGuard<'_, IdleConnections> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reason why a request over one connection got no response.
enum ExchangeError {
    /// The connection closed before any of the request was sent.
    Unsent(hyper::Error),
    /// The connection broke after the request was sent, at least in part.
    Broke(hyper::Error, Box<PooledConnection>),
    /// The engine sent something else.
    Failed(SendError),
}

/// A response body as received from the engine. At its end, the connection returns to the pool.
/// Dropping the body earlier closes the connection.
pub struct EngineBody {
    incoming: Incoming,
    /// Connection that delivers the body; `None` after the end.
    link: Option<Box<PooledConnection>>,
    endpoint: Arc<EngineEndpoint>,
    /// Data that was awaited and not taken yet.
    ahead: VecDeque<Bytes>,
}

impl EngineBody {
    /// Returns the connection as soon as the body is known to have ended, because a writer that
    /// relies on the announced length never polls again.
    fn settle(&mut self) {
        if self.incoming.is_end_stream()
            && let Some(link) = self.link.take()
        {
            self.endpoint.give_back(link);
        }
    }
}

impl EngineBody {
    /// Returns the first data of the body, if it was awaited and not taken yet.
    pub fn first(&self) -> Option<&[u8]> {
        self.ahead.front().map(|data| &**data)
    }

    /// Waits for the first data, which later polls return, or for the end of the body.
    ///
    /// # Errors
    /// Returns a [`SendError`] if the connection breaks first.
    pub fn poll_first(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if self.ahead.is_empty() {
            ready!(self.poll_ahead(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Waits for further data and returns it; later polls return it too. `None` at the end of the
    /// body.
    ///
    /// # Errors
    /// Returns a [`SendError`] if the connection breaks first.
    pub fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, SendError>> {
        loop {
            let Some(frame) = ready!(self.poll_engine(cx)) else {
                return Poll::Ready(Ok(None));
            };
            // Trailers concern this connection only.
            if let Ok(data) = frame?.into_data() {
                self.ahead.push_back(data.clone());
                return Poll::Ready(Ok(Some(data)));
            }
        }
    }

    /// Skips what has arrived. If that is all of the body, its connection returns to the pool.
    pub(crate) fn skip_arrived(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..SKIPPED_FRAMES_MAX {
            if !matches!(self.poll_engine(&mut cx), Poll::Ready(Some(Ok(_)))) {
                break;
            }
        }
    }

    fn poll_engine(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendError>>> {
        let Some(link) = &mut self.link else {
            return Poll::Ready(None);
        };
        link.drive(cx);
        // Only `drive` makes progress on frames, and it has already registered the waker.
        let mut quiet = Context::from_waker(Waker::noop());
        match Pin::new(&mut self.incoming).poll_frame(&mut quiet) {
            Poll::Ready(Some(Ok(frame))) => {
                self.settle();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                self.link = None;
                Poll::Ready(Some(Err(SendError::Broke(error))))
            }
            Poll::Ready(None) => {
                if let Some(link) = self.link.take() {
                    self.endpoint.give_back(link);
                }
                Poll::Ready(None)
            }
            Poll::Pending if link.is_over => {
                self.link = None;
                Poll::Ready(Some(Err(SendError::Ended)))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = SendError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendError>>> {
        match self.ahead.pop_front() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None => self.poll_engine(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.link.is_none() && self.ahead.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.incoming.size_hint();
        let ahead: u64 = self.ahead.iter().map(|data| data.len() as u64).sum();
        if ahead > 0 {
            let (lower, upper) = (hint.lower(), hint.upper());
            hint = SizeHint::new();
            hint.set_lower(lower + ahead);
            if let Some(upper) = upper {
                hint.set_upper(upper + ahead);
            }
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sockets_use_keepalive_and_no_delay() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        prepare(&stream, Duration::from_secs(20)).unwrap();
        assert!(stream.nodelay().unwrap());
        assert!(SockRef::from(&stream).keepalive().unwrap());
    }
}
