//! The event stream: ids, and resuming after the last event that was received.

use super::*;
use api::cluster::events::{ClusterEvent, EVENTS_KEPT_MAX};

/// A client of the event stream.
struct Listening(Body);

impl Listening {
    /// Opens the stream after the event with id `id`, if given.
    async fn after(bench: &Bench, id: Option<&str>) -> Self {
        Self::at(bench, "/admin/v1/events", id).await
    }

    async fn at(bench: &Bench, path: &str, id: Option<&str>) -> Self {
        let mut request = Request::get(path);
        if let Some(id) = id {
            request = request.header("last-event-id", id);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = bench.api.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self(response.into_body())
    }

    /// Returns the next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<StreamedEvent> {
        let frame = self.0.frame().await?.unwrap();
        let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
        let field = |name: &str| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        Some(StreamedEvent {
            name: field("event").unwrap().to_owned(),
            id: field("id").map(ToOwned::to_owned),
            data: serde_json::from_str(field("data").unwrap()).unwrap(),
        })
    }

    async fn hello(&mut self) -> StreamedEvent {
        let hello = self.next().await.unwrap();
        assert_eq!(hello.name, "connected");
        hello
    }
}

#[derive(Debug)]
struct StreamedEvent {
    name: String,
    id: Option<String>,
    data: Value,
}

impl StreamedEvent {
    fn id(&self) -> &str {
        self.id.as_deref().unwrap()
    }
}

fn send(bench: &Bench, count: usize) {
    for _ in 0..count {
        let event = ClusterEvent::Quorum { has_quorum: false };
        bench.admin.events.send(event);
    }
}

#[tokio::test]
async fn events_are_streamed_until_the_replica_stops() {
    let bench = Bench::new();
    let mut stream = Listening::after(&bench, None).await;
    let hello = stream.hello().await;
    let epoch = hello.data["epoch"].as_str().unwrap();
    assert_eq!(hello.data["applied_index"], 1);
    assert_eq!(hello.id(), format!("{epoch}-0"));
    send(&bench, 1);
    let event = stream.next().await.unwrap();
    assert_eq!(event.name, "quorum");
    assert_eq!(
        (&event.data["event"], &event.data["has_quorum"]),
        (&json!("quorum"), &json!(false))
    );
    assert!(event.data["at_ms"].is_u64(), "{event:?}");
    assert_eq!(event.id(), format!("{epoch}-1"));
    bench.admin.readiness.lifecycle.end_streams();
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_reconnecting_client_gets_missed_events() {
    let bench = Bench::new();
    let mut stream = Listening::after(&bench, None).await;
    let begun = stream.hello().await.id().to_owned();
    send(&bench, 3);
    let had = stream.next().await.unwrap().id().to_owned();
    drop(stream);
    for (last, expected) in [(&had, vec![2, 3, 4]), (&begun, vec![1, 2, 3, 4])] {
        let mut again = Listening::after(&bench, Some(last)).await;
        // If cut off here, the client would ask for the same events.
        assert_eq!(again.hello().await.id(), last);
        if last == &had {
            send(&bench, 1);
        }
        for number in expected {
            let event = again.next().await.unwrap();
            assert_eq!(event.name, "quorum");
            assert!(event.id().ends_with(&format!("-{number}")), "{event:?}");
        }
    }
}

#[tokio::test]
async fn dropped_events_are_counted() {
    let bench = Bench::new();
    let mut stream = Listening::after(&bench, None).await;
    let begun = stream.hello().await.id().to_owned();
    send(&bench, EVENTS_KEPT_MAX + 2);
    let mut again = Listening::after(&bench, Some(&begun)).await;
    again.hello().await;
    let missed = again.next().await.unwrap();
    assert_eq!(
        (missed.name.as_str(), &missed.data),
        ("missed", &json!({ "events": 2 }))
    );
    assert!(again.next().await.unwrap().id().ends_with("-3"));
}

#[tokio::test]
async fn an_event_id_of_another_process_is_reported_as_missed() {
    let bench = Bench::new();
    send(&bench, 2);
    let mut stream = Listening::after(&bench, None).await;
    let hello = stream.hello().await;
    let epoch = hello.data["epoch"].as_str().unwrap();
    let ahead = format!("{epoch}-3");
    for other in ["1", "no id", "00000000-1", &ahead] {
        let mut stream = Listening::after(&bench, Some(other)).await;
        assert_eq!(stream.hello().await.id(), hello.id());
        let missed = stream.next().await.unwrap();
        assert_eq!(
            (missed.name.as_str(), &missed.data),
            ("missed", &json!({ "events": null }))
        );
    }
}

#[tokio::test]
async fn a_stream_begins_with_past_events_on_request() {
    let bench = Bench::new();
    send(&bench, 5);
    for (last, first) in [(2, 4), (5, 1), (EVENTS_KEPT_MAX, 1)] {
        let path = format!("/admin/v1/events?last={last}");
        let mut stream = Listening::at(&bench, &path, None).await;
        stream.hello().await;
        for number in first..=5 {
            let event = stream.next().await.unwrap();
            assert!(event.id().ends_with(&format!("-{number}")), "{event:?}");
        }
    }
    let path = format!("/admin/v1/events?last={}", EVENTS_KEPT_MAX + 1);
    let refused = bench.call("GET", &path, "").await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    // A client that reconnects goes on after its last event.
    let mut stream = Listening::after(&bench, None).await;
    let newest = stream.hello().await.id().to_owned();
    let mut again = Listening::at(&bench, "/admin/v1/events?last=3", Some(&newest)).await;
    again.hello().await;
    send(&bench, 1);
    assert!(again.next().await.unwrap().id().ends_with("-6"));
}
