//! A replica without free file descriptors: its clients get an error, and its engines are not
//! blamed.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::client::chat;
use super::engine::{Engine, json};
use super::fleet::Fleet;

/// Environment variable of the child process that runs without descriptors. It has a process of its
/// own because the limit applies to all threads.
const ALONE: &str = "API_TEST_WITHOUT_DESCRIPTORS";
const NAME: &str = "descriptors::a_shortage_of_descriptors_is_not_blamed_on_an_engine";

#[test]
fn a_shortage_of_descriptors_is_not_blamed_on_an_engine() {
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        return runtime.unwrap().block_on(ask_without_descriptors());
    }
    let program = std::env::current_exe().unwrap();
    let alone = Command::new(program)
        .args(["--exact", NAME, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&alone.stderr);
    assert!(alone.status.success(), "{said}");
}

async fn ask_without_descriptors() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    // The connection is accepted while descriptors are free; none to the engine is open yet.
    let models = client.ask("GET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n");
    assert_eq!(models.await.status, 200);
    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, none).unwrap();
    // Far more failures than open a circuit.
    for _ in 0..20 {
        let answer = client.ask(chat("")).await;
        assert_eq!(answer.status, 503, "{}", answer.body);
        assert!(
            answer.body.contains("out_of_connections"),
            "{}",
            answer.body
        );
        assert!(answer.header("retry-after").is_some());
    }
    assert!(engine.requests().is_empty());
    setrlimit(Resource::Nofile, limit).unwrap();
    // An unhealthy engine, or one with an open circuit, would not be called.
    assert_eq!(client.ask(chat("")).await.status, 200);
    fleet.is_idle().await;
}
