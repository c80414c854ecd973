//! `GET /admin/v1/events`: changes in the cluster, as server-sent events.
//!
//! Each event has an id: the random epoch of this process and the event's number. A client that
//! reconnects with `Last-Event-ID` gets the events that it missed, as far as they are kept, and the
//! number of the others. For an id of another epoch or replica, it is informed that events cannot
//! be resumed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use http::StatusCode;
use http::request::Parts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use super::AdminState;
use super::answer::QueryParams;
use super::problem::invalid;
use api::cluster::events::{EVENTS_KEPT_MAX, NumberedEvent};
use api::error::Problem;

/// Maximum number of open event streams.
pub const STREAMS_MAX: usize = 64;
/// Interval of keep-alive comments in the absence of events, so that dead clients are detected.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Data of `connected`, the first event of a stream. Its id is that of the event before the first
/// one that the stream delivers, so that a client can resume from there.
#[derive(Serialize)]
struct Connected<'a> {
    applied_index: u64,
    /// Epoch of this process, which differs from that of every other process.
    epoch: &'a str,
}

/// Data of an event sent in place of those that the client was too slow to receive, or that are no
/// longer kept.
#[derive(Serialize)]
struct Missed {
    /// Number of missed events; `null` if unknown, because the last one received was from another
    /// process.
    events: Option<u64>,
}

/// Random text in event ids that distinguishes events of this process from those of others.
#[derive(Debug, Clone)]
pub(super) struct EventEpoch(Arc<str>);

impl EventEpoch {
    pub(super) fn draw() -> Self {
        Self(format!("{:08x}", rand::random::<u32>()).into())
    }

    fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.0)
    }

    /// Returns the event number in `id`; `None` if the id has another epoch.
    fn number(&self, id: &str) -> Option<u64> {
        let (epoch, number) = id.split_once('-')?;
        (epoch == &*self.0).then(|| number.parse().ok()).flatten()
    }
}

/// Id of the last event that the client received; `None` for a new client.
pub(super) struct LastEventId(Option<String>);

impl<S: Sync> FromRequestParts<S> for LastEventId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let id = parts.headers.get("last-event-id");
        let id = id.map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned());
        Ok(Self(id.filter(|id| !id.is_empty())))
    }
}

/// Query parameters of the stream.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// Number of past events to begin with, as far as they are kept. Ignored with `Last-Event-ID`.
    #[schemars(range(max = EVENTS_KEPT_MAX))]
    last: usize,
}

struct Subscriber {
    receiver: Receiver<Arc<NumberedEvent>>,
    epoch: EventEpoch,
    stop: CancellationToken,
    /// Events to send before those from `receiver`.
    first: VecDeque<SseEvent>,
    /// Permit for an open stream, returned on drop.
    _permit: OwnedSemaphorePermit,
}

/// Response with a stream of events.
pub(super) struct EventsAnswer(Response);

impl IntoResponse for EventsAnswer {
    fn into_response(self) -> Response {
        self.0
    }
}

pub(super) async fn events(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<EventsQuery>,
    last: LastEventId,
) -> Result<EventsAnswer, Problem> {
    if query.last > EVENTS_KEPT_MAX {
        let expected = format!("{}, expected at most {EVENTS_KEPT_MAX}", query.last);
        return Err(invalid("last", expected));
    }
    let Ok(permit) = Arc::clone(&admin.streams).try_acquire_owned() else {
        let problem = Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "limit",
            "too many event streams are open",
        );
        let problem = problem.detail(format!("at most {STREAMS_MAX}"));
        return Err(problem.retry_after(10));
    };
    let epoch = admin.epoch.clone();
    let number = last.0.as_ref().and_then(|id| epoch.number(id));
    let resumed = number.and_then(|number| admin.events.subscribe_after(number));
    let missed = match (&last.0, &resumed) {
        (None, _) => None,
        (Some(_), None) => Some(Missed { events: None }),
        (Some(_), Some(resumed)) => (resumed.missed > 0).then_some(Missed {
            events: Some(resumed.missed),
        }),
    };
    let past = if last.0.is_none() { query.last } else { 0 };
    let subscription = resumed.unwrap_or_else(|| admin.events.subscribe_last(past));
    let connected = Connected {
        applied_index: admin.view.applied().0,
        epoch: &epoch.0,
    };
    let connected = event("connected", &connected).id(epoch.id(subscription.after));
    let missed = missed.map(|missed| event("missed", &missed));
    let earlier = subscription.earlier.iter();
    let earlier = earlier.map(|it| numbered(&epoch, it));
    let first = [connected].into_iter().chain(missed).chain(earlier);
    let subscriber = Subscriber {
        first: first.collect(),
        receiver: subscription.later,
        stop: admin.readiness.lifecycle.ended(),
        epoch,
        _permit: permit,
    };
    let stream = Sse::new(follow(subscriber)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    Ok(EventsAnswer(stream.into_response()))
}

fn follow(subscriber: Subscriber) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    stream::unfold(subscriber, |mut subscriber| async move {
        if let Some(first) = subscriber.first.pop_front() {
            return Some((Ok(first), subscriber));
        }
        let received = tokio::select! {
            biased;
            () = subscriber.stop.cancelled() => return None,
            received = subscriber.receiver.recv() => received,
        };
        let event = match received {
            Ok(happened) => numbered(&subscriber.epoch, &happened),
            Err(RecvError::Lagged(events)) => {
                let events = Some(events);
                event("missed", &Missed { events })
            }
            Err(RecvError::Closed) => return None,
        };
        Some((Ok(event), subscriber))
    })
}

fn numbered(epoch: &EventEpoch, happened: &NumberedEvent) -> SseEvent {
    event(happened.event.name(), happened).id(epoch.id(happened.number))
}

fn event(name: &'static str, data: &impl Serialize) -> SseEvent {
    let data = serde_json::to_string(data).expect("events have string keys only");
    SseEvent::default().event(name).data(data)
}
