//! Requests that wait for a backend below its limit: order, rejections, leaving clients.

use std::sync::Arc;
use std::time::Duration;

use api::proxy::DrainResult;
use api::routing::LoadTable;
use state::admission::{AdmissionSettings, Batching, Concurrency, Order};
use state::command::{Command, UserDefaults};
use state::ids::ReplicaId;
use state::quotas::UserLimits;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::client::{Answer, Client, post};
use super::engine::{Engine, Step, json};
use super::fleet::{Fleet, eventually};

/// Returns settings that limit each backend to one concurrent request.
fn one_at_a_time() -> AdmissionSettings {
    AdmissionSettings {
        concurrency: Concurrency::Fixed(1),
        ..AdmissionSettings::default()
    }
}

async fn fleet(engines: &[&Engine], settings: AdmissionSettings) -> Fleet {
    let patient = Duration::from_secs(60);
    let fleet = Fleet::start_with(engines, patient, |settings| settings.priority_max = 5).await;
    fleet.apply(Command::PutAdmission(settings));
    fleet
}

/// Starts a fleet whose users have these limits.
pub(super) async fn limited(engine: &Engine, limits: UserLimits) -> Fleet {
    let fleet = fleet(&[engine], AdmissionSettings::default()).await;
    let defaults = UserDefaults {
        limits,
        ..UserDefaults::default()
    };
    fleet.apply(Command::PutUserDefaults(Box::new(defaults)));
    fleet
}

/// Starts an engine that takes a permit of `gate` for each response.
pub(super) async fn gated(gate: &Arc<Semaphore>) -> Engine {
    let steps = vec![Step::Await(Arc::clone(gate)), json("200 OK", USAGE)];
    Engine::always(steps).await
}

const USAGE: &str = r#"{"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;

/// Returns a chat request of a user; `headers` are additional header lines.
pub(super) fn chat_of(user: &str, headers: &str) -> String {
    chat_about("more", user, headers)
}

/// Returns a chat request like [`chat_of`], whose prompt depends on `topic`.
fn chat_about(topic: &str, user: &str, headers: &str) -> String {
    let headers = format!("content-type: application/json\r\nx-quorate-user: {user}\r\n{headers}");
    let words = format!("tell me {topic} ").repeat(20);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{words}"}}]}}"#);
    post("/v1/chat/completions", &headers, &body)
}

fn waiting(fleet: &Fleet) -> usize {
    let lines = fleet.admission.queues();
    lines.iter().map(|line| line.waiting).sum()
}

/// Sends a request that has to wait; returns its connection once it waits.
pub(super) async fn wait(fleet: &Fleet, request: &str) -> Client {
    let before = waiting(fleet);
    let mut client = fleet.client().await;
    client.send(request).await;
    eventually("it waits", || waiting(fleet) == before + 1).await;
    client
}

/// Sends a request that is dispatched; returns its connection once the engine has it.
pub(super) async fn run(fleet: &Fleet, request: &str) -> Client {
    let before = fleet.running();
    let mut client = fleet.client().await;
    client.send(request).await;
    eventually("it runs", || fleet.running() == before + 1).await;
    client
}

/// Returns the users of the requests an engine received, in order.
fn users(engine: &Engine) -> String {
    let user = |request: &String| {
        let mut lines = request.lines().rev();
        let user = lines.find_map(|line| line.strip_prefix("x-quorate-user: "));
        user.unwrap_or("-").to_owned()
    };
    engine.requests().iter().map(user).collect()
}

pub(super) async fn all_answered(clients: Vec<Client>, status: u16) {
    for mut client in clients {
        assert_eq!(client.answer().await.status, status);
    }
}

/// Returns the users in the order in which they are served: user a has one request running and
/// three waiting when user b sends two.
async fn served_under(order: Order) -> String {
    let gate = Arc::new(Semaphore::new(0));
    // It reports no usage, so the estimate is charged.
    let engine = Engine::always(vec![Step::Await(gate.clone()), json("200 OK", "{}")]).await;
    let settings = AdmissionSettings {
        order,
        ..one_at_a_time()
    };
    let fleet = fleet(&[&engine], settings).await;
    let mut clients = vec![run(&fleet, &chat_about("0", "a", "")).await];
    for (topic, user) in [("1", "a"), ("2", "a"), ("3", "a"), ("4", "b"), ("5", "b")] {
        clients.push(wait(&fleet, &chat_about(topic, user, "")).await);
        // The state lifts a user who returns.
        fleet.flush().await;
    }
    gate.add_permits(6);
    all_answered(clients, 200).await;
    fleet.is_idle().await;
    assert_eq!(waiting(&fleet), 0);
    users(&engine)
}

#[tokio::test]
async fn users_are_served_by_their_usage() {
    assert_eq!(served_under(Order::Fcfs).await, "aaaabb");
    // b is lifted to a's counter, and a was first; from then on they take turns.
    assert_eq!(served_under(Order::Vtc).await, "aababa");
}

#[tokio::test]
async fn a_higher_priority_goes_first_up_to_the_allowed_one() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let mut clients = vec![run(&fleet, &chat_of("a", "")).await];
    for (user, priority) in [("b", "-1"), ("c", "0"), ("d", "5"), ("e", "900")] {
        let header = format!("x-quorate-priority: {priority}\r\n");
        clients.push(wait(&fleet, &chat_of(user, &header)).await);
    }
    gate.add_permits(5);
    all_answered(clients, 200).await;
    assert_eq!(users(&engine), "adecb");
    let mut client = fleet.client().await;
    let bad = client
        .ask(chat_of("a", "x-quorate-priority: high\r\n"))
        .await;
    assert_eq!(bad.status, 400);
}

#[tokio::test]
async fn a_waiting_client_that_disconnects_leaves_the_queue() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let gone = wait(&fleet, &chat_of("b", "")).await;
    let third = wait(&fleet, &chat_of("c", "")).await;
    drop(gone);
    eventually("it left", || waiting(&fleet) == 1).await;
    gate.add_permits(2);
    all_answered(vec![first, third], 200).await;
    fleet.is_idle().await;
    assert_eq!(users(&engine), "ac");
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended), (2, 2));
    assert_eq!((charge.queued, charge.dequeued), (2, 2));
}

#[tokio::test]
async fn disconnected_waiting_clients_reach_no_engine() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let dropped = wait(&fleet, &chat_of("b", "")).await;
    let mut half = wait(&fleet, &chat_of("b", "")).await;
    let reset = wait(&fleet, &chat_of("b", "")).await;
    let last = wait(&fleet, &chat_of("c", "")).await;
    drop(dropped);
    eventually("one has left", || waiting(&fleet) == 3).await;
    half.stream.shutdown().await.unwrap();
    eventually("two have left", || waiting(&fleet) == 2).await;
    reset.stream.set_zero_linger().unwrap();
    drop(reset);
    eventually("three have left", || waiting(&fleet) == 1).await;
    gate.add_permits(2);
    all_answered(vec![first, last], 200).await;
    fleet.is_idle().await;
    assert_eq!(users(&engine), "ac");
}

#[tokio::test]
async fn a_clients_deadline_ends_its_wait() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let patient = wait(&fleet, &chat_of("c", "x-stainless-timeout: 600\r\n")).await;
    for header in ["x-request-timeout: 50ms\r\n", "grpc-timeout: 50m\r\n"] {
        let mut second = fleet.client().await;
        let answer = second.ask(chat_of("b", header)).await;
        assert_refused(&answer, 503, "queue_timeout");
    }
    gate.add_permits(2);
    all_answered(vec![first, patient], 200).await;
    assert_eq!(users(&engine), "ac");
}

#[tokio::test]
async fn a_request_that_would_miss_its_deadline_is_refused_at_once() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let mut clients = vec![run(&fleet, &chat_of("a", "")).await];
    for _ in 0..6 {
        clients.push(wait(&fleet, &chat_of("a", "")).await);
    }
    // Nothing is dispatched: the requests ahead take longer than the client will wait.
    let hopeless = chat_of("a", "x-request-timeout: 1ms\r\n");
    let mut client = fleet.client().await;
    let mut code = String::new();
    for _ in 0..1000 {
        let answer = client.ask(&hopeless).await;
        assert_refused(&answer, 503, &answer.error_code());
        code = answer.error_code();
        if code == "queue_too_long" {
            let seconds: u32 = answer.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=90).contains(&seconds), "{seconds}");
            break;
        }
    }
    assert_eq!(code, "queue_too_long");
    gate.add_permits(7);
    all_answered(clients, 200).await;
    assert_eq!(users(&engine), "aaaaaaa");
}

pub(super) fn assert_refused(answer: &Answer, status: u16, code: &str) {
    answer.refuses(status, code);
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test]
async fn a_full_queue_and_a_long_wait_are_refused() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let settings = AdmissionSettings {
        max_queue: 1,
        max_wait_ms: 100,
        ..one_at_a_time()
    };
    let fleet = fleet(&[&engine], settings).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let mut second = fleet.client().await;
    second.send(chat_of("b", "")).await;
    // Either request may wait: the other finds the queue full, or the first wait has ended by then.
    let answer = second.answer().await;
    assert_refused(&answer, 503, "queue_timeout");
    gate.add_permits(1);
    all_answered(vec![first], 200).await;
}

#[tokio::test]
async fn the_queue_is_bounded() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let settings = AdmissionSettings {
        max_queue: 1,
        ..one_at_a_time()
    };
    let fleet = fleet(&[&engine], settings).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let second = wait(&fleet, &chat_of("b", "")).await;
    let mut third = fleet.client().await;
    assert_refused(&third.ask(chat_of("c", "")).await, 503, "queue_full");
    gate.add_permits(2);
    all_answered(vec![first, second], 200).await;
}

#[tokio::test]
async fn a_user_over_a_limit_gets_retry_after() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let limits = UserLimits {
        concurrent: Some(1),
        ..UserLimits::default()
    };
    let fleet = limited(&engine, limits).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let mut second = fleet.client().await;
    let answer = second.ask(chat_of("a", "")).await;
    assert_refused(&answer, 429, "rate_limit_exceeded");
    let other = run(&fleet, &chat_of("b", "")).await;
    // The state learns that the requests run; it need not learn that they ended.
    fleet.flush().await;
    gate.add_permits(3);
    all_answered(vec![first, other], 200).await;
    fleet.is_idle().await;
    assert_eq!(second.ask(chat_of("a", "")).await.status, 200);
}

#[tokio::test]
async fn requests_per_window_are_bounded() {
    let engine = Engine::always(vec![json("200 OK", USAGE)]).await;
    let limits = UserLimits {
        requests: Some(2),
        window_ms: Some(3_600_000),
        ..UserLimits::default()
    };
    let fleet = limited(&engine, limits).await;
    let mut client = fleet.client().await;
    for _ in 0..2 {
        assert_eq!(client.ask(chat_of("a", "")).await.status, 200);
    }
    let answer = client.ask(chat_of("a", "")).await;
    assert_refused(&answer, 429, "rate_limit_exceeded");
    let seconds: u32 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((2..=1800).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn room_at_a_peer_wakes_local_waiters() {
    let engine = Engine::always(vec![json("200 OK", USAGE)]).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let peer = LoadTable::default();
    let backend = fleet.backend(0);
    let busy = peer.begin(backend, 1);
    let told = |report: Vec<u8>| {
        let load = fleet.router.load();
        load.merge_report(ReplicaId(2), &report, Instant::now())
            .unwrap();
    };
    told(peer.local_report());
    let client = wait(&fleet, &chat_of("a", "")).await;
    drop(busy);
    told(peer.local_report());
    all_answered(vec![client], 200).await;
}

#[tokio::test]
async fn removing_a_limit_dispatches_all_waiting_requests() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let mut clients = vec![run(&fleet, &chat_of("a", "")).await];
    clients.push(wait(&fleet, &chat_of("b", "")).await);
    clients.push(wait(&fleet, &chat_of("c", "")).await);
    fleet.apply(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Unlimited,
        ..AdmissionSettings::default()
    }));
    eventually("all run", || fleet.running() == 3).await;
    gate.add_permits(3);
    all_answered(clients, 200).await;
}

#[tokio::test]
async fn a_refused_dispatch_keeps_its_place_in_the_queue() {
    let gates = [0; 3].map(|_| Arc::new(Semaphore::new(0)));
    let [refuse, first, second] = gates.clone();
    let engines = [
        Engine::start(move |n| match n {
            0 => vec![
                Step::Await(refuse.clone()),
                json("503 Service Unavailable", "{}"),
            ],
            _ => vec![Step::Await(first.clone()), json("200 OK", USAGE)],
        })
        .await,
        gated(&second).await,
    ];
    let fleet = fleet(&[&engines[0], &engines[1]], one_at_a_time()).await;
    // Least requests, ties by chance: either way, the two requests fill both engines.
    let mut clients = vec![run(&fleet, &chat_of("a", "")).await];
    clients.push(run(&fleet, &chat_of("b", "")).await);
    let refused = users(&engines[0]);
    clients.push(wait(&fleet, &chat_of("c", "")).await);
    clients.push(wait(&fleet, &chat_of("d", "")).await);
    gates[0].add_permits(1);
    // The refused request waits for the second engine, c was sent to the first.
    eventually("c runs", || engines[0].requests().len() == 2).await;
    eventually("two wait", || waiting(&fleet) == 2).await;
    gates[2].add_permits(1);
    eventually("one goes", || engines[1].requests().len() == 2).await;
    let served = users(&engines[1]);
    assert!(
        served.ends_with(&refused),
        "{served}: {refused} waited first"
    );
    gates[1].add_permits(9);
    gates[2].add_permits(9);
    all_answered(clients, 200).await;
}

#[tokio::test]
async fn waiting_clients_are_sent_elsewhere_when_the_replica_leaves() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = Fleet::start_with(&[&engine], Duration::from_millis(400), |_| {}).await;
    fleet.apply(Command::PutAdmission(one_at_a_time()));
    let _running = run(&fleet, &chat_of("a", "")).await;
    let mut second = wait(&fleet, &chat_of("b", "")).await;
    fleet.drain.cancel();
    assert_refused(&second.answer().await, 503, "replica_leaving");
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 1 });
}

#[tokio::test]
async fn a_batch_is_sent_to_one_backend() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let settings = AdmissionSettings {
        concurrency: Concurrency::Fixed(3),
        batching: Batching::Static,
        order: Order::Fcfs,
        ..AdmissionSettings::default()
    };
    let fleet = fleet(&[&engine], settings).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let mut clients = Vec::new();
    for _ in 0..5 {
        clients.push(wait(&fleet, &chat_of("b", "")).await);
    }
    assert_eq!(fleet.running(), 1, "the batch is under way");
    gate.add_permits(1);
    all_answered(vec![first], 200).await;
    eventually("three run together", || fleet.running() == 3).await;
    assert_eq!(waiting(&fleet), 2);
    gate.add_permits(1);
    eventually("one has ended", || fleet.running() == 2).await;
    assert_eq!(waiting(&fleet), 2, "the batch is under way");
    gate.add_permits(4);
    all_answered(clients, 200).await;
}

#[tokio::test]
async fn a_batch_has_no_more_requests_than_its_bin_allows() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let settings = AdmissionSettings {
        concurrency: Concurrency::Fixed(4),
        batching: Batching::Static,
        bin_batch_max: vec![2],
        ..AdmissionSettings::default()
    };
    let fleet = fleet(&[&engine], settings).await;
    let first = run(&fleet, &chat_of("a", "")).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(wait(&fleet, &chat_of("b", "")).await);
    }
    gate.add_permits(1);
    all_answered(vec![first], 200).await;
    eventually("two run together", || fleet.running() == 2).await;
    assert_eq!(waiting(&fleet), 1, "the batch is full");
    gate.add_permits(3);
    all_answered(clients, 200).await;
}

/// Runs 24 clients on two backends with one place each. A quarter of the requests are abandoned as
/// soon as they are sent.
#[tokio::test]
async fn no_request_is_lost_under_churn() {
    let engines = [
        Engine::always(vec![json("200 OK", USAGE)]).await,
        Engine::always(vec![json("200 OK", USAGE)]).await,
    ];
    let fleet = Arc::new(fleet(&[&engines[0], &engines[1]], one_at_a_time()).await);
    let clients: Vec<_> = (0..24)
        .map(|number: usize| {
            let fleet = Arc::clone(&fleet);
            tokio::spawn(async move {
                let user = ["a", "b", "c"][number % 3];
                for round in 0..12 {
                    let mut client = fleet.client().await;
                    if (number + round).is_multiple_of(4) {
                        client.send(chat_of(user, "")).await;
                        drop(client);
                    } else {
                        assert_eq!(client.ask(chat_of(user, "")).await.status, 200);
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    fleet.is_idle().await;
    eventually("nothing waits", || waiting(&fleet) == 0).await;
    let charge = fleet.charged().await;
    assert_eq!(charge.started, charge.ended);
    assert_eq!(charge.queued, charge.dequeued);
    assert!(charge.queued > 0, "something waited");
}

#[tokio::test]
async fn waiting_requests_are_listed_longest_first() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let fleet = fleet(&[&engine], one_at_a_time()).await;
    let mut clients = vec![run(&fleet, &chat_of("a", "")).await];
    for user in ["b", "c", "b"] {
        clients.push(wait(&fleet, &chat_of(user, "")).await);
    }
    let nothing = serde_json::Value::Null;
    let (status, told) = fleet.call("GET", "/admin/v1/waiting", &nothing).await;
    assert_eq!(
        (status, &told["requests"], &told["users"]),
        (200, &3.into(), &2.into())
    );
    let mut waiting = told["waiting"].as_array().unwrap().iter();
    let mut next = || {
        let user = waiting.next().unwrap();
        assert_eq!(user["models"], serde_json::json!(["m"]));
        (user["user"].clone(), user["requests"].clone())
    };
    assert_eq!(next(), ("b".into(), 2.into()));
    assert_eq!(next(), ("c".into(), 1.into()));
    let longest = fleet.admission.all_waiting().longest.unwrap();
    assert_eq!(
        longest.user,
        state::prefix::user_key(fleet.hash_seed(), "b")
    );
    gate.add_permits(4);
    all_answered(clients, 200).await;
}
