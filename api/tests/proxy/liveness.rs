//! Engines whose server lives while their core does not.

use std::sync::Arc;
use std::time::Duration;

use api::engines::backends::{ProbeSettings, Standstill};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const STREAM: &str = ",\"stream\":true";
const COMMENT: &str = ": keep-alive\n\n";

/// Returns steps that send `keep_alive` again and again, as long as permits come.
fn kept_alive(keep_alive: &str, gate: &Arc<Semaphore>, times: usize) -> Vec<Step> {
    let step = [Step::Await(Arc::clone(gate)), chunk(keep_alive)];
    std::iter::repeat_n(step, times).flatten().collect()
}

#[tokio::test]
async fn keep_alives_do_not_move_the_deadline() {
    const TIMES: usize = 2_000;
    for keep_alive in [
        COMMENT,
        "event: ping\ndata: {\"type\": \"ping\"}\n\n",
        "data:\n\n",
    ] {
        for before in [None, Some(delta("a", 1))] {
            let gate = Arc::new(Semaphore::new(0));
            let mut steps = vec![stream_head()];
            steps.extend(before.as_deref().map(chunk));
            steps.extend(kept_alive(keep_alive, &gate, TIMES));
            steps.push(Step::Hang);
            let engine = Engine::always(steps).await;
            let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
                settings.timeouts.first_byte = Duration::from_millis(100);
                settings.timeouts.answer_idle = Duration::from_millis(100);
            })
            .await;
            let ticking = tokio::spawn(async move {
                let mut ticks = tokio::time::interval(Duration::from_millis(5));
                loop {
                    ticks.tick().await;
                    gate.add_permits(1);
                }
            });
            let answer = fleet.client().await.ask(chat(STREAM)).await;
            ticking.abort();
            assert!(answer.body.contains("backend_timeout"), "{}", answer.body);
            let kept = answer.body.matches(keep_alive.trim_end()).count();
            assert!(kept > 0 && kept < TIMES, "{kept}");
            fleet.is_idle().await;
            let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
            assert_eq!(circuit.recent_failures, u32::from(before.is_none()));
        }
    }
}

#[tokio::test]
async fn clients_that_leave_a_silent_engine_open_its_circuit() {
    let hung = Engine::always(vec![Step::Hang]).await;
    let alive = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start(&[&hung, &alive]).await;
    let asked = || hung.requests().len() + alive.requests().len();
    let request = chat(STREAM).replace("host:", "x-quorate-policy: round-robin\r\nhost:");
    let mut waiting = Vec::new();
    while hung.requests().len() < 5 {
        let mut client = fleet.client().await;
        client.send(&request).await;
        waiting.push(client);
        eventually("it is sent", || asked() == waiting.len()).await;
    }
    let since = std::time::Instant::now();
    let patience = Duration::from_millis(1_200);
    eventually("they lose patience", || since.elapsed() > patience).await;
    drop(waiting);
    fleet.is_idle().await;
    let circuit = |number| {
        fleet
            .backends
            .circuit(fleet.backend(number), Instant::now())
    };
    assert!(circuit(0).is_open && !circuit(1).is_open);
}

/// Starts an engine with this page of metrics and this response to `/is_sleeping`.
async fn probed(metrics: &'static str, sleeping: Option<&'static str>) -> Engine {
    Engine::answering(move |request| match request {
        _ if request.starts_with("GET /metrics") => {
            let length = metrics.len();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            vec![Step::Send(format!("{head}{metrics}").into_bytes())]
        }
        _ if request.starts_with("GET /is_sleeping") => match sleeping {
            Some(body) => vec![json("200 OK", body)],
            None => vec![json("404 Not Found", "{}")],
        },
        _ if request.starts_with("GET /v1/models") => {
            vec![json("200 OK", r#"{"data":[{"id":"m"}]}"#)]
        }
        _ => vec![json("200 OK", "{}")],
    })
    .await
}

async fn watched(engines: &[&Engine]) -> Fleet {
    let probes = ProbeSettings {
        interval: Duration::from_millis(10),
        hung_after: Duration::from_millis(50),
        ..ProbeSettings::default()
    };
    Fleet::start_probed(engines, probes).await
}

fn standstill(fleet: &Fleet, number: usize) -> Option<Standstill> {
    let record = fleet.backends.record(fleet.backend(number).slot);
    record.and_then(|record| record.standstill)
}

#[tokio::test]
async fn a_sleeping_engine_gets_no_requests() {
    let asleep = probed("", Some(r#"{"is_sleeping":true}"#)).await;
    let awake = probed("", Some(r#"{"is_sleeping":false}"#)).await;
    let old = probed("", None).await;
    let fleet = watched(&[&asleep, &awake, &old]).await;
    eventually("it is seen", || {
        standstill(&fleet, 0) == Some(Standstill::Asleep)
    })
    .await;
    for _ in 0..6 {
        assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    }
    let asked = |engine: &Engine| {
        let requests = engine.requests();
        requests.iter().filter(|it| it.starts_with("POST")).count()
    };
    assert_eq!((asked(&asleep), asked(&awake) + asked(&old)), (0, 6));
    assert_eq!((standstill(&fleet, 1), standstill(&fleet, 2)), (None, None));
    let requests = old.requests();
    let pages = requests
        .iter()
        .filter(|it| it.starts_with("GET /is_sleeping"));
    assert_eq!(pages.count(), 1, "a missing page is asked for once");
}

#[tokio::test]
async fn running_requests_without_progress_make_an_engine_unhealthy() {
    let hung = probed(
        "vllm:num_requests_running 2\nvllm:generation_tokens_total 7\n",
        None,
    )
    .await;
    let idle = probed(
        "vllm:num_requests_running 0\nvllm:generation_tokens_total 7\n",
        None,
    )
    .await;
    let fleet = watched(&[&hung, &idle]).await;
    eventually("it is seen", || {
        standstill(&fleet, 0) == Some(Standstill::Hung)
    })
    .await;
    let record = fleet.backends.record(fleet.backend(0).slot).unwrap();
    assert!(!record.is_healthy && record.detail.unwrap().contains("may hang"));
    for _ in 0..4 {
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.header("x-quorate-backend"), Some("e1"));
    }
    assert_eq!(standstill(&fleet, 1), None);
}
