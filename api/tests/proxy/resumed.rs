//! Streams whose clients go on at another replica, with the text that they have received.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use api::proxy::{ProxySettings, RequestOutcome};
use serde_json::{Value, json};
use state::ids::ReplicaId;
use tokio::sync::Semaphore;

use super::client::{Answer, Client, post};
use super::continued::{is_continued, next_delta, requests, text};
use super::engine::{DONE, Engine, Step, chunk, delta, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const ROLE: &str = "data: {\"id\":\"c\",\"created\":5,\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const PATH: &str = "/v1/chat/completions";

/// Returns the headers of a client that can go on, behind the event with this id, if any.
fn headers(user: &str, last: Option<&str>) -> String {
    let last = last.map_or_else(String::new, |id| format!("last-event-id: {id}\r\n"));
    format!("x-quorate-user: {user}\r\nx-quorate-session: s\r\nx-quorate-resumable: 1\r\n{last}")
}

/// Returns the body of a chat with these further fields.
fn body(fields: &Value) -> String {
    let mut body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body.to_string()
}

fn begins(user: &str) -> String {
    post(PATH, &headers(user, None), &body(&json!({})))
}

fn resumes(user: &str, last: &str, received: &str) -> String {
    let received = json!({ "quorate_received": received });
    post(PATH, &headers(user, Some(last)), &body(&received))
}

/// Returns the ids of the events so far.
fn ids(stream: &str) -> Vec<String> {
    let ids = stream.lines().filter_map(|line| line.strip_prefix("id:"));
    ids.map(|id| id.trim().to_owned()).collect()
}

/// Starts an engine that streams `first` and then waits for `more` to send `then`. It continues
/// with the text `c` of so many `tokens`, unless requests to continue still `break` it.
async fn engine(
    (first, then): (&[String], &[String]),
    more: &Arc<Semaphore>,
    [breaks, tokens]: &[Arc<AtomicUsize>; 2],
) -> Engine {
    let owned =
        |events: &[String]| -> Vec<Step> { events.iter().map(|event| chunk(event)).collect() };
    let (first, then, more) = (owned(first), owned(then), Arc::clone(more));
    let (breaks, tokens) = (Arc::clone(breaks), Arc::clone(tokens));
    Engine::answering(move |request| {
        let mut steps = vec![stream_head()];
        let less = |left: usize| left.checked_sub(1);
        if is_continued(request) && breaks.fetch_update(SeqCst, SeqCst, less).is_ok() {
            steps.push(chunk(ROLE));
            steps.push(Step::Close);
        } else if is_continued(request) {
            let tokens = tokens.load(SeqCst) as u32;
            let usage = format!("\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{tokens}}}");
            let event = |choices: &str| {
                format!("data: {{\"id\":\"d\",\"created\":9,\"choices\":[{choices}],{usage}}}\n\n")
            };
            let end = event(r#"{"index":0,"delta":{},"finish_reason":"stop"}"#);
            let events = [next_delta("c", 9, tokens), end, event(""), DONE.into()];
            steps.extend(owned(&events));
            steps.push(last_chunk());
        } else {
            steps.extend_from_slice(&first);
            steps.push(Step::Await(Arc::clone(&more)));
            steps.extend_from_slice(&then);
            steps.push(Step::Hang);
        }
        steps
    })
    .await
}

/// Two replicas in front of two engines.
struct Scene {
    replicas: Vec<Fleet>,
    engines: [Engine; 2],
    /// Lets the engine of the first stream go on.
    more: Arc<Semaphore>,
    /// Number of requests to continue that break their engine.
    breaks: Arc<AtomicUsize>,
    /// Number of tokens with which an engine continues.
    tokens: Arc<AtomicUsize>,
}

impl Scene {
    async fn start(first: &[String], then: &[String]) -> Self {
        let scene = Self::unflushed(first, then).await;
        scene.keep_flushing();
        scene
    }

    /// Starts replicas that write nothing to the log yet.
    async fn unflushed(first: &[String], then: &[String]) -> Self {
        let more = Arc::new(Semaphore::new(0));
        let counts = [0, 1].map(|count| Arc::new(AtomicUsize::new(count)));
        let engines = [
            engine((first, then), &more, &counts).await,
            engine((first, then), &more, &counts).await,
        ];
        let [breaks, tokens] = counts;
        let settings = [1, 2].map(|number| {
            let mut settings = ProxySettings::new(ReplicaId(number));
            settings.streams.resumable = true;
            settings
        });
        let replicas = Fleet::replicas(&[&engines[0], &engines[1]], settings.into()).await;
        Self {
            replicas,
            engines,
            more,
            breaks,
            tokens,
        }
    }

    fn keep_flushing(&self) {
        self.replicas.iter().for_each(Fleet::keep_flushing);
    }

    /// Begins a stream at the first replica, and reads up to `last`.
    async fn begin(&self, user: &str, last: &str) -> (Client, String) {
        self.begin_with(&begins(user), last).await
    }

    async fn begin_with(&self, request: &str, last: &str) -> (Client, String) {
        let mut client = self.replicas[0].client().await;
        client.send(request.to_owned()).await;
        client.read_until(last).await;
        client.read_until("\n\n").await;
        let read = String::from_utf8_lossy(&client.read).into_owned();
        let id = ids(&read).pop().unwrap();
        (client, id)
    }

    async fn ask(&self, replica: usize, request: String) -> Answer {
        self.replicas[replica].client().await.ask(request).await
    }

    /// Returns the prompt and output tokens that a user has paid for, and the requests in flight.
    async fn paid(&self, user: &str) -> [u64; 3] {
        for replica in &self.replicas {
            let outbox = replica.router.outbox();
            eventually("everything is in the log", || {
                outbox.is_empty() && !outbox.is_outstanding()
            })
            .await;
        }
        let path = format!("/admin/v1/users/{user}");
        let (_, user) = self.replicas[0].call("GET", &path, &json!({})).await;
        let of = |name: &str| user["total"][name].as_u64().unwrap();
        let input = of("input_uncached") + of("input_cached");
        [input, of("output"), user["in_flight"].as_u64().unwrap()]
    }

    /// Returns the turns of the only session, and its output tokens.
    async fn turns(&self) -> [u64; 2] {
        let path = "/admin/v1/sessions";
        let (_, shown) = self.replicas[0].call("GET", path, &json!({})).await;
        let session = &shown["sessions"][0];
        let of = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{shown}"));
        [of(&session["turns"]), of(&session["usage"]["output"])]
    }

    async fn are_idle(&self) {
        for replica in &self.replicas {
            replica.is_idle().await;
        }
    }
}

fn first() -> Vec<String> {
    vec![ROLE.to_owned(), delta("a", 1), delta("b", 2)]
}

#[tokio::test]
async fn a_client_goes_on_at_another_replica_exactly_behind_its_last_event() {
    let scene = Scene::start(&first(), &[]).await;
    let (client, id) = scene.begin("u", "\"b\"").await;
    drop(client);
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    assert_eq!((answer.status, text(&answer)), (200, "c".to_owned()));
    assert_eq!(answer.header("x-quorate-resumable"), Some("1"));
    assert!(!answer.body.contains("assistant"), "{}", answer.body);
    assert!(!answer.body.contains("\"id\":\"d\"") && !answer.body.contains("\"created\":9"));
    let usage = r#""usage":{"prompt_tokens":7,"completion_tokens":3}"#;
    assert!(answer.body.contains(usage), "{}", answer.body);
    assert!(answer.body.ends_with(DONE) && answer.is_complete);
    assert!(ids(&answer.body).len() >= 2);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 3, 0]);
    assert_eq!(scene.turns().await, [1, 3]);
    let next = requests(&scene.engines).pop().unwrap();
    assert!(!next.contains("quorate_received") && !next.contains("last-event-id"));
    assert_eq!(scene.replicas[1].count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn a_stream_that_was_taken_over_ends_and_charges_nothing_more() {
    let then: Vec<String> = (3..100).map(|tokens| delta("x", tokens)).collect();
    let scene = Scene::start(&first(), &then).await;
    let (mut old, id) = scene.begin("u", "\"b\"").await;
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    assert_eq!(text(&answer), "c");
    scene.more.add_permits(1);
    let old = old.answer().await;
    assert!(old.body.contains("stream_taken_over"), "{}", old.body);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 3, 0]);
    assert_eq!(scene.turns().await, [1, 3]);
}

#[tokio::test]
async fn the_last_of_several_clients_carries_the_stream() {
    let scene = Scene::start(&first(), &[]).await;
    let (old, id) = scene.begin("u", "\"b\"").await;
    for replica in [1, 0, 0, 1] {
        let answer = scene.ask(replica, resumes("u", &id, "ab")).await;
        assert_eq!((answer.status, text(&answer)), (200, "c".to_owned()));
    }
    drop(old);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 3, 0]);
    assert_eq!(scene.turns().await, [1, 3]);
}

#[tokio::test]
async fn a_stream_whose_choice_has_ended_gets_only_its_end() {
    let stop = "data: {\"id\":\"c\",\"created\":5,\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    let first = [first(), vec![stop.to_owned()]].concat();
    let scene = Scene::start(&first, &[]).await;
    let (client, id) = scene.begin("u", "\"stop\"").await;
    drop(client);
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    let usage =
        r#""choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}"#;
    assert!(
        answer.body.starts_with("data: {\"id\":\"c\""),
        "{}",
        answer.body
    );
    assert!(answer.body.contains(usage) && answer.body.ends_with(DONE));
    assert_eq!(requests(&scene.engines).len(), 1);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 2, 0]);
    assert_eq!(scene.turns().await, [1, 2]);
}

#[tokio::test]
async fn a_claim_that_does_not_add_up_is_refused_and_stops_nothing() {
    let scene = Scene::start(&first(), &[]).await;
    let (mut old, id) = scene.begin("u", "\"b\"").await;
    let shown = String::from_utf8_lossy(&old.read).into_owned();
    let earlier = ids(&shown)[0].clone();
    let received = |received: Value| body(&json!({ "quorate_received": received }));
    let asked = |last: Option<&str>, body: &str| post(PATH, &headers("u", last), body);
    for (request, because) in [
        (resumes("u", &id, "ax"), "has 2 bytes and the xxh3"),
        (resumes("u", &id, "a"), "1 bytes are not the text"),
        (resumes("u", &earlier, "ab"), "has 0 bytes"),
        (resumes("u", "5", "ab"), "is not an id"),
        (resumes("u", &"A".repeat(300), "ab"), "is not an id"),
        (
            asked(Some(&id), &body(&json!({}))),
            "quorate_received: is missing",
        ),
        (asked(Some(&id), &received(json!(["ab"]))), "must be text"),
        (
            asked(None, &received(json!("ab"))),
            "last-event-id: is missing",
        ),
    ] {
        let answer = scene.ask(1, request).await;
        assert_eq!(
            (answer.status, answer.error_code()),
            (400, "invalid_request".into())
        );
        assert!(answer.body.contains(because), "{because}: {}", answer.body);
    }
    let changed = json!({ "quorate_received": "ab", "temperature": 1 });
    for request in [
        resumes("thief", &id, "ab"),
        asked(Some(&id), &body(&changed)),
    ] {
        let answer = scene.ask(1, request).await;
        assert_eq!(answer.status, 400);
        assert!(
            answer.body.contains("same path, body and user"),
            "{}",
            answer.body
        );
    }
    assert_eq!(scene.replicas[0].running(), 1);
    assert_eq!(requests(&scene.engines).len(), 1);
    old.read_until("\"b\"").await;
    drop(old);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 2, 0]);
}

#[tokio::test]
async fn an_answer_that_cannot_be_continued_is_refused_and_stops_nothing() {
    let scene = Scene::start(&first(), &[]).await;
    let limit = json!({ "max_tokens": 2 });
    let begins = post(PATH, &headers("u", None), &body(&limit));
    let (old, id) = scene.begin_with(&begins, "\"b\"").await;
    let fields = json!({ "max_tokens": 2, "quorate_received": "ab" });
    let request = post(PATH, &headers("u", Some(&id)), &body(&fields));
    let answer = scene.ask(1, request).await;
    let expected = (409, "stream_not_resumable".into());
    assert_eq!((answer.status, answer.error_code()), expected);
    assert!(answer.body.contains("maximum length"), "{}", answer.body);
    assert_eq!(scene.replicas[0].running(), 1);
    assert_eq!(requests(&scene.engines).len(), 1);
    drop(old);
    scene.are_idle().await;
}

#[tokio::test]
async fn a_backend_that_breaks_before_it_goes_on_is_replaced() {
    let scene = Scene::start(&first(), &[]).await;
    let (client, id) = scene.begin("u", "\"b\"").await;
    drop(client);
    scene.breaks.store(1, SeqCst);
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    assert_eq!((answer.status, text(&answer)), (200, "c".to_owned()));
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 3, 0]);
    assert_eq!(scene.turns().await, [1, 3]);
}

#[tokio::test]
async fn a_client_may_try_again_after_the_backends_that_were_to_go_on_broke() {
    let scene = Scene::start(&first(), &[]).await;
    let (client, id) = scene.begin("u", "\"b\"").await;
    drop(client);
    scene.breaks.store(2, SeqCst);
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    assert_eq!(
        (answer.status, answer.error_code()),
        (502, "backend_broke".into())
    );
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 2, 0]);
}

#[tokio::test]
async fn a_client_that_leaves_while_it_takes_its_stream_over_pays_what_it_has() {
    let scene = Scene::unflushed(&first(), &[]).await;
    let (old, id) = scene.begin("u", "\"b\"").await;
    let mut client = scene.replicas[1].client().await;
    client.send(resumes("u", &id, "ab")).await;
    eventually("the take-over is queued", || {
        !scene.replicas[1].router.outbox().is_empty()
    })
    .await;
    drop(client);
    scene.replicas[1].is_idle().await;
    // The take-over comes first in the log, so what the first carrier has charged is void.
    scene.replicas[1].keep_flushing();
    eventually("it is in the log", || {
        let outbox = scene.replicas[1].router.outbox();
        outbox.is_empty() && !outbox.is_outstanding()
    })
    .await;
    drop(old);
    scene.replicas[0].keep_flushing();
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 2, 0]);
}

#[tokio::test]
async fn events_have_ids_only_where_the_client_could_go_on() {
    let call = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"name\":\"f\"}}]}}]}\n\n";
    let scene = Scene::start(&[delta("a", 1), call.into(), call.into()], &[]).await;
    let mut client = scene.replicas[0].client().await;
    client.send(begins("u")).await;
    while String::from_utf8_lossy(&client.read)
        .matches("tool_calls")
        .count()
        < 2
    {
        assert!(client.fill().await);
    }
    let found = ids(&String::from_utf8_lossy(&client.read));
    assert_eq!((found.len(), found[1].as_str()), (2, ""));
    drop(client);
    for (headers, fields) in [
        ("x-quorate-user: u\r\n", json!({})),
        (&*headers("u", None), json!({ "logprobs": true })),
        (&*headers("u", None), json!({ "n": 2 })),
        (
            &*headers("u", None),
            json!({ "response_format": {"type": "json_object"} }),
        ),
    ] {
        let mut client = scene.replicas[0].client().await;
        client.send(post(PATH, headers, &body(&fields))).await;
        client.read_until("\"a\"").await;
        let read = String::from_utf8_lossy(&client.read).into_owned();
        assert!(
            !read.contains("x-quorate-resumable") && ids(&read).is_empty(),
            "{read}"
        );
    }
    scene.are_idle().await;
}

#[tokio::test]
async fn a_resumed_request_is_recorded_as_one() {
    let scene = Scene::start(&first(), &[]).await;
    let (client, id) = scene.begin("u", "\"b\"").await;
    drop(client);
    let answer = scene.ask(1, resumes("u", &id, "ab")).await;
    let request = answer.header("x-request-id").unwrap().to_owned();
    let path = format!("/admin/v1/decisions/{request}");
    let (_, record) = scene.replicas[1].call("GET", &path, &json!({})).await;
    assert_eq!(record["resumed"], true, "{record}");
    scene.are_idle().await;
}

#[tokio::test]
async fn output_that_a_client_lets_engines_generate_again_is_charged_again() {
    let first: Vec<String> = std::iter::once(ROLE.to_owned())
        .chain((1..200).map(|tokens| delta("a", tokens)))
        .chain([delta("z", 200)])
        .collect();
    let scene = Scene::start(&first, &[]).await;
    let (client, _) = scene.begin("u", "\"z\"").await;
    let read = String::from_utf8_lossy(&client.read).into_owned();
    drop(client);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 200, 0]);
    // The id of the first event with text.
    let early = &ids(&read)[1];
    scene.tokens.store(199, SeqCst);
    let answer = scene.ask(1, resumes("u", early, "a")).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    scene.are_idle().await;
    // Of the 200 tokens that the client did not say it has, a charge on its way may have had 64.
    assert_eq!(scene.paid("u").await, [7, 200 + 200 - (1 + 64), 0]);
}

#[tokio::test]
async fn a_stream_that_is_resumed_again_and_again_is_charged_again() {
    let scene = Scene::start(&first(), &[]).await;
    let (old, id) = scene.begin("u", "\"b\"").await;
    drop(old);
    for replica in (0..16).map(|number| number % 2) {
        let answer = scene.ask(replica, resumes("u", &id, "ab")).await;
        assert_eq!(answer.status, 200);
    }
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [7, 3, 0]);
    let answer = scene.ask(0, resumes("u", &id, "ab")).await;
    assert_eq!(answer.status, 200);
    scene.are_idle().await;
    assert_eq!(scene.paid("u").await, [14, 6, 0]);
}
