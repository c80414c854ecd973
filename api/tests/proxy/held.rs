//! Requests for a model without engines that are up, which wait for one to start.

use api::engines::backends::Health;
use serde_json::json;
use state::admission::AdmissionSettings;
use state::capacity::ModelDemand;
use state::command::{BackendSpec, Command};
use state::ids::ReplicaId;
use tokio_util::sync::CancellationToken;

use api::proxy::ProxySettings;

use super::admission::{all_answered, run, wait};
use super::client::post;
use super::engine::{Engine, json as answer_json};
use super::fleet::{Fleet, HEALTHY, HELD, HELD_BRIEFLY, eventually};

fn chat(model: &str) -> String {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]});
    let headers = "content-type: application/json\r\n";
    post("/v1/chat/completions", headers, &body.to_string())
}

async fn engine() -> Engine {
    Engine::always(vec![answer_json("200 OK", "{}")]).await
}

/// Registers `engine` with `model`, after those that there are.
fn register(fleet: &Fleet, engine: &Engine, model: &str) {
    let number = fleet.registry().backends.len();
    fleet.apply(Command::PutBackend(BackendSpec {
        models: vec![model.to_owned()],
        ..engine.spec(number)
    }));
}

#[tokio::test]
async fn requests_for_a_held_model_go_to_the_first_engine_that_is_up() {
    let fleet = Fleet::start(&[]).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(wait(&fleet, &chat(HELD)).await);
    }
    let engine = engine().await;
    register(&fleet, &engine, HELD);
    // It is registered before it is up.
    clients.push(wait(&fleet, &chat(HELD)).await);
    assert!(engine.requests().is_empty());
    fleet.assume_healthy();
    all_answered(clients, 200).await;
    assert_eq!(engine.requests().len(), 4);
    fleet.is_idle().await;
}

#[tokio::test]
async fn held_requests_end_in_the_error_of_others_after_their_time() {
    let fleet = Fleet::start(&[]).await;
    let answer = fleet.client().await.ask(chat(HELD_BRIEFLY)).await;
    assert_eq!(answer.status, 404, "{}", answer.body);
    assert!(answer.body.contains("model_not_found"), "{}", answer.body);
    let engine = engine().await;
    register(&fleet, &engine, HELD_BRIEFLY);
    let down = Health {
        is_healthy: false,
        ..HEALTHY
    };
    fleet.backends.assume(fleet.backend(0).slot, &down);
    let answer = fleet.client().await.ask(chat(HELD_BRIEFLY)).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(engine.requests().is_empty());
    fleet.is_idle().await;
}

#[tokio::test]
async fn requests_for_other_models_are_not_held() {
    let fleet = Fleet::start(&[]).await;
    let answer = fleet.client().await.ask(chat("made-up")).await;
    assert_eq!(answer.status, 404, "{}", answer.body);
    assert!(fleet.admission.queues().is_empty());
}

#[tokio::test]
async fn a_held_request_leaves_the_queue_with_its_client() {
    let fleet = Fleet::start(&[]).await;
    let client = wait(&fleet, &chat(HELD)).await;
    drop(client);
    eventually("it is gone", || fleet.admission.queues().is_empty()).await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn held_requests_are_bounded_as_the_queue_is() {
    let fleet = Fleet::start(&[]).await;
    fleet.apply(Command::PutAdmission(AdmissionSettings {
        max_queue: 2,
        ..AdmissionSettings::default()
    }));
    let mut clients = Vec::new();
    for _ in 0..2 {
        clients.push(wait(&fleet, &chat(HELD)).await);
    }
    let answer = fleet.client().await.ask(chat(HELD)).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    let engine = engine().await;
    register(&fleet, &engine, HELD);
    fleet.assume_healthy();
    all_answered(clients, 200).await;
}

#[tokio::test]
async fn explain_says_that_a_held_request_would_wait() {
    let fleet = Fleet::start(&[]).await;
    let body = json!({"model": HELD, "messages": [{"role": "user", "content": "hello"}]});
    let asked = json!({"path": "/v1/chat/completions", "body": body});
    let (status, said) = fleet.call("POST", "/admin/v1/explain", &asked).await;
    assert_eq!(status, 200, "{said}");
    assert_eq!(said["admission"]["would_wait"], true, "{said}");
    assert_eq!(said["refusal"], serde_json::Value::Null, "{said}");
}

#[tokio::test]
async fn demand_at_one_replica_wants_an_engine_at_all_replicas() {
    let settings = [1, 2].map(|id| ProxySettings::new(ReplicaId(id)));
    let replicas = Fleet::replicas(&[], settings.into()).await;
    let stop = CancellationToken::new();
    for (fleet, id) in replicas.iter().zip(1..) {
        let (admission, stop) = (fleet.admission.clone(), stop.clone());
        tokio::spawn(async move { admission.run_demand(ReplicaId(id), stop).await });
        fleet.keep_flushing();
    }
    let seen = |fleet: &Fleet| fleet.router.view().capacity().model(HELD);
    assert!(replicas.iter().all(|it| seen(it).wanted == 0));
    let clients = vec![wait(&replicas[0], &chat(HELD)).await];
    for replica in &replicas {
        eventually("it wants an engine", || seen(replica).wanted == 1).await;
        assert_eq!(seen(replica).demand.waiting, 1);
        assert_eq!(seen(replica), seen(&replicas[0]));
    }
    let engine = engine().await;
    register(&replicas[0], &engine, HELD);
    replicas.iter().for_each(Fleet::assume_healthy);
    all_answered(clients, 200).await;
    for replica in &replicas {
        let is_over = || seen(replica).demand == ModelDemand::default();
        eventually("the demand is over", is_over).await;
        assert_eq!(seen(replica).wanted, 1, "for a while");
    }
    stop.cancel();
}

#[tokio::test]
async fn a_running_request_is_demand() {
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let engine = super::admission::gated(&gate).await;
    let fleet = Fleet::start(&[]).await;
    register(&fleet, &engine, HELD);
    fleet.assume_healthy();
    let (admission, stop) = (fleet.admission.clone(), CancellationToken::new());
    let stopped = stop.clone();
    tokio::spawn(async move { admission.run_demand(ReplicaId(1), stopped).await });
    fleet.keep_flushing();
    let client = run(&fleet, &chat(HELD)).await;
    let seen = || fleet.router.view().capacity().model(HELD);
    eventually("it is reported", || seen().demand.running == 1).await;
    assert_eq!(seen().wanted, 1);
    gate.add_permits(1);
    all_answered(vec![client], 200).await;
    stop.cancel();
}
