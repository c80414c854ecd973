//! `GET /admin/v1/events`: changes in the cluster, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use http::StatusCode;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use super::AdminState;
use super::answer::retry_after;
use crate::error::Problem;
use crate::events::NumberedEvent;

/// Maximum number of open event streams.
pub const STREAMS_MAX: usize = 64;
/// Interval of comments in the absence of events, so that dead clients are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// First event of every stream, which tells a client that it misses nothing from here on.
#[derive(Serialize)]
struct Connected {
    applied_index: u64,
}

/// Sent in place of events that the client was too slow to receive.
#[derive(Serialize)]
struct Missed {
    events: u64,
}

struct Subscriber {
    receiver: Receiver<Arc<NumberedEvent>>,
    stop: CancellationToken,
    hello: Option<SseEvent>,
    /// Returned when the stream is dropped.
    _permit: OwnedSemaphorePermit,
}

pub(super) async fn events(State(admin): State<AdminState>) -> Response {
    let Ok(permit) = Arc::clone(&admin.streams).try_acquire_owned() else {
        let problem = Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "limit",
            "too many event streams are open",
        );
        return retry_after(problem.detail(format!("at most {STREAMS_MAX}")), 10);
    };
    let receiver = admin.events.subscribe();
    let connected = Connected {
        applied_index: admin.view.applied().0,
    };
    let subscriber = Subscriber {
        receiver,
        stop: admin.readiness.lifecycle.ended(),
        hello: Some(event("connected", &connected)),
        _permit: permit,
    };
    Sse::new(follow(subscriber))
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response()
}

fn follow(subscriber: Subscriber) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    stream::unfold(subscriber, |mut subscriber| async move {
        if let Some(hello) = subscriber.hello.take() {
            return Some((Ok(hello), subscriber));
        }
        let received = tokio::select! {
            biased;
            () = subscriber.stop.cancelled() => return None,
            received = subscriber.receiver.recv() => received,
        };
        let event = match received {
            Ok(numbered) => {
                event(numbered.event.name(), &*numbered).id(numbered.number.to_string())
            }
            Err(RecvError::Lagged(events)) => event("missed", &Missed { events }),
            Err(RecvError::Closed) => return None,
        };
        Some((Ok(event), subscriber))
    })
}

fn event(name: &'static str, data: &impl Serialize) -> SseEvent {
    let data = serde_json::to_string(data).expect("events have string keys only");
    SseEvent::default().event(name).data(data)
}
