//! One connection to an engine, and what its end reveals about the request that it carried.
//!
//! An engine may close an idle connection just when a request is sent over it. Another one may read
//! the request and crash because of it. Both connections end without a byte of a response, but TCP
//! tells them apart: a host whose program closes a connection with data unread, or receives data
//! after that, sends a reset (RFC 1122, section 4.2.2.13). A program that ends after it read all of
//! the request leaves nothing to reset. A reset without a response thus shows that the engine did
//! not read the whole request, so that it cannot have run it (RFC 9110, section 9.2.2).

use std::error::Error as _;
use std::future::Future;
use std::io;
use std::task::{Context, Waker};
use std::time::Duration;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::dialer::RulesId;
use super::informational::InformationalCount;
use super::segments::Segments;
use crate::net::tls::MaybeTls;

/// Maximum time from the end of a connection to the reset for what was still on its way: a round
/// trip.
const RESET_FOLLOWS_WITHIN: Duration = Duration::from_millis(200);
/// Maximum time from sending a request to the end of a connection that the engine closed before.
/// Later resets have other causes, such as an engine's host that was started again.
const RACE_MAX: Duration = Duration::from_secs(1);

/// A connection to an engine, with the sender of its requests.
pub(super) struct PooledConnection {
    pub(super) sender: http1::SendRequest<Segments>,
    pub(super) connection: http1::Connection<TokioIo<MaybeTls<TcpStream>>, Segments>,
    /// Whether `connection` has ended, so that it must not be polled again.
    pub(super) is_over: bool,
    pub(super) informational: InformationalCount,
    /// Id of the address rules that applied when the connection was opened.
    pub(super) rules: RulesId,
    pub(super) opened_at: Instant,
    pub(super) idle_since: Instant,
}

impl PooledConnection {
    pub(super) fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.is_over {
            // The future that waits for the response or its body also gets the error. Nothing is
            // sent at the end: the engine's host could answer it with a reset.
            self.is_over = self.connection.poll_without_shutdown(cx).is_ready();
        }
    }

    /// Whether the connection can take a request. Checks the socket without blocking.
    pub(super) fn is_reusable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.is_over && self.sender.is_ready()
    }

    /// Whether the engine certainly did not read all of the request that was sent at `sent_at`,
    /// after the connection failed with `error`. May wait for a reset.
    pub(super) fn left_unread(
        self: Box<Self>,
        sent_at: Instant,
        error: &hyper::Error,
    ) -> impl Future<Output = bool> + use<> {
        let is_race = sent_at.elapsed() < RACE_MAX && !error.is_parse();
        let is_answered = self.informational.is_any();
        let is_reset = is_reset(error);
        let parts = self.connection.into_parts();
        let is_unanswered = is_race && !is_answered && parts.read_buf.is_empty();
        async move { is_unanswered && (is_reset || was_reset(parts.io.inner().transport()).await) }
    }
}

/// Whether a connection failed because of a reset.
fn is_reset(error: &hyper::Error) -> bool {
    let io = error.source().and_then(|source| source.downcast_ref());
    io.is_some_and(|error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        )
    })
}

/// Whether a reset follows the end of a connection.
async fn was_reset(stream: &TcpStream) -> bool {
    let reset = timeout(RESET_FOLLOWS_WITHIN, stream.ready(Interest::ERROR));
    matches!(reset.await, Ok(Ok(_))) && matches!(stream.take_error(), Ok(Some(_)))
}
