//! A replica without free file descriptors: its clients get an error, and its engines are not
//! blamed.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::Instant;

use super::client::{Answer, chat};
use super::engine::{Engine, Step, json};
use super::fleet::Fleet;

/// Environment variable of the child process that runs without descriptors. It has a process of its
/// own because the limit applies to all threads.
const ALONE: &str = "API_TEST_WITHOUT_DESCRIPTORS";

/// Runs `asking` in a child process that runs only the test `name` of this module.
fn alone(name: &str, asking: impl Future<Output = ()>) {
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        return runtime.unwrap().block_on(asking);
    }
    let program = std::env::current_exe().unwrap();
    let alone = Command::new(program)
        .args(["--exact", &format!("descriptors::{name}"), "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&alone.stdout);
    assert!(
        alone.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

/// Runs `asking` while no descriptor is free.
async fn without_descriptors(asking: impl Future<Output = ()>) {
    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, none).unwrap();
    asking.await;
    setrlimit(Resource::Nofile, limit).unwrap();
}

#[test]
fn a_shortage_of_descriptors_is_not_blamed_on_an_engine() {
    alone(
        "a_shortage_of_descriptors_is_not_blamed_on_an_engine",
        ask_without_descriptors(),
    );
}

#[test]
fn no_engine_is_blamed_for_a_request_that_this_host_cannot_repeat() {
    alone(
        "no_engine_is_blamed_for_a_request_that_this_host_cannot_repeat",
        leave_unread_without_descriptors(),
    );
}

fn out_of_connections(answer: &Answer) {
    let Answer { status, body, .. } = answer;
    assert_eq!(*status, 503, "{body}");
    assert!(body.contains("out_of_connections"), "{body}");
}

async fn leave_unread_without_descriptors() {
    let answers = |number| match number {
        0 => vec![json("200 OK", "{}"), Step::CloseUnread],
        _ => vec![json("200 OK", "{}")],
    };
    let engine = Engine::start(answers).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 200);
    without_descriptors(async {
        out_of_connections(&client.ask(chat("")).await);
    })
    .await;
    assert_eq!(fleet.metrics.pool.reset.get(), 1);
    let backend = fleet.backend(0);
    let circuit = fleet.backends.circuit(backend, Instant::now());
    assert_eq!(circuit.recent_failures, 0);
    assert_eq!(
        fleet.backends.record(backend.slot).unwrap().failures_total,
        0
    );
    assert_eq!(client.ask(chat("")).await.status, 200);
    assert_eq!(engine.requests().len(), 2);
    fleet.is_idle().await;
}

async fn ask_without_descriptors() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    // The connection is accepted while descriptors are free; none to the engine is open yet.
    let models = client.ask("GET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n");
    assert_eq!(models.await.status, 200);
    without_descriptors(async {
        // Far more failures than open a circuit.
        for _ in 0..20 {
            let answer = client.ask(chat("")).await;
            out_of_connections(&answer);
            assert!(answer.header("retry-after").is_some());
        }
        assert!(engine.requests().is_empty());
    })
    .await;
    // An unhealthy engine, or one with an open circuit, would not be called.
    assert_eq!(client.ask(chat("")).await.status, 200);
    fleet.is_idle().await;
}
