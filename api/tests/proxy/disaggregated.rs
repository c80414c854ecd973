//! Requests on two engines, as with vLLM's NIXL connector: one computes the prompt, the other
//! fetches its blocks and answers.

use api::proxy::RequestOutcome;
use serde_json::{Value, json};
use state::command::{BackendRole, BackendSpec, Charge, Command};

use super::client::{Answer, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json as whole, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const COMPUTED: &str = r#"{"id":"p","usage":{"prompt_tokens":1010,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":400}},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8],"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600}}"#;
pub(super) const ANSWERED: &str = r#"{"id":"d","choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1010,"completion_tokens":30,"prompt_tokens_details":{"cached_tokens":1009}}}"#;
const LOST: &str = r#"{"error":{"message":"KV load failed"}}"#;

/// Starts a fleet in which `e0` computes prompts and the other engines answer.
async fn apart(engines: &[&Engine]) -> Fleet {
    let fleet = Fleet::start(engines).await;
    for (number, engine) in engines.iter().enumerate() {
        let role = match number {
            0 => BackendRole::Prefill,
            _ => BackendRole::Decode,
        };
        fleet.apply(Command::PutBackend(BackendSpec {
            id: format!("e{number}"),
            url: format!("http://{}", engine.address),
            models: vec!["m".to_owned()],
            labels: Default::default(),
            capacity_blocks: Some(100_000),
            kv_events: None,
            kv_replay: None,
            role,
        }));
    }
    fleet
}

pub(super) fn long(fields: &str) -> String {
    let words = "Words of a prompt. ".repeat(220);
    let body = format!(r#"{{"model":"m","prompt":"{words}","max_tokens":30{fields}}}"#);
    post(
        "/v1/completions",
        "content-type: application/json\r\n",
        &body,
    )
}

pub(super) fn body(request: &str) -> Value {
    let (_, body) = request.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap()
}

pub(super) fn answered_by(answer: &Answer) -> (u16, Option<&str>, Option<&str>) {
    let prefill = answer.header("x-quorate-prefill");
    (answer.status, prefill, answer.header("x-quorate-backend"))
}

pub(super) fn tokens(charged: &Charge) -> [u64; 3] {
    [charged.input_uncached, charged.input_cached, charged.output]
}

#[tokio::test]
async fn a_disaggregated_prompt_is_charged_once() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = apart(&[&computing, &answering]).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
    assert_eq!(
        answer.body, ANSWERED,
        "the client gets what the engine says"
    );
    let [asked, got] = [&computing, &answering].map(|engine| body(&engine.requests()[0]));
    assert_eq!(
        (&asked["max_tokens"], &asked["stream"]),
        (&json!(1), &json!(false))
    );
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(got["max_tokens"], 30);
    let told: Value = serde_json::from_str(COMPUTED).unwrap();
    assert_eq!(got["kv_transfer_params"], told["kv_transfer_params"]);
    assert_eq!(asked["prompt"], got["prompt"]);
    fleet.is_idle().await;
    assert_eq!(tokens(&fleet.charged().await), [610, 400, 30]);
}

/// The engines share a KV store, and their connector returns no transfer parameters. The second
/// engine finds in its cache what the first computed for the same request.
#[tokio::test]
async fn a_prompt_without_handover_is_charged_by_the_larger_computation() {
    let (computed, _) = COMPUTED.split_once(",\"kv_transfer_params\"").unwrap();
    let computed = format!("{computed}}}");
    // vLLM has no details where nothing was cached.
    let cold = computed.replace("{\"cached_tokens\":400}", "null");
    for (computed, cached_by_the_second, charged) in [
        (&computed, 1009, [610, 400, 30]),
        (&computed, 100, [910, 100, 30]),
        (&cold, 1009, [1010, 0, 30]),
    ] {
        let answered = ANSWERED.replace("1009", &cached_by_the_second.to_string());
        let computing = Engine::always(vec![whole("200 OK", computed)]).await;
        let answering = Engine::always(vec![whole("200 OK", &answered)]).await;
        let fleet = apart(&[&computing, &answering]).await;
        assert_eq!(fleet.client().await.ask(long("")).await.status, 200);
        fleet.is_idle().await;
        assert_eq!(tokens(&fleet.charged().await), charged);
    }
}

#[tokio::test]
async fn a_stream_comes_from_the_decode_engine() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let steps = vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(DONE),
        last_chunk(),
    ];
    let answering = Engine::always(steps).await;
    let fleet = apart(&[&computing, &answering]).await;
    let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
    assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
    assert!(answer.body.contains("[DONE]") && answer.is_complete);
    let [asked, got] = [&computing, &answering].map(|engine| body(&engine.requests()[0]));
    assert_eq!(
        (&asked["stream"], &got["stream"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(asked.get("stream_options"), None);
    assert_eq!(got["stream_options"]["include_usage"], true);
    fleet.is_idle().await;
}

#[tokio::test]
async fn decode_engine_answers_if_prefill_fails() {
    let hidden = r#"{"id":"p","usage":{"prompt_tokens":9},"kv_transfer_params":null}"#;
    let of_the_second = [1, 1009, 30];
    // The first has answered that it computed the prompt, and found nothing cached.
    let of_the_first = [1010, 0, 30];
    for (steps, charged) in [
        (
            vec![whole("500 Internal Server Error", "{}")],
            of_the_second,
        ),
        (vec![whole("429 Too Many Requests", "{}")], of_the_second),
        (vec![whole("400 Bad Request", "{}")], of_the_second),
        (vec![whole("200 OK", hidden)], of_the_first),
        (vec![whole("200 OK", "no JSON")], of_the_first),
        (vec![Step::Close], of_the_second),
        (
            vec![
                Step::Send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_vec()),
                Step::Close,
            ],
            of_the_second,
        ),
    ] {
        let computing = Engine::always(steps).await;
        let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
        let fleet = apart(&[&computing, &answering]).await;
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
        assert_eq!(
            (computing.requests().len(), answering.requests().len()),
            (1, 1)
        );
        let got = body(&answering.requests()[0]);
        assert_eq!(got.get("kv_transfer_params"), None);
        fleet.is_idle().await;
        assert_eq!(tokens(&fleet.charged().await), charged);
    }
    let (dead, answering) = (
        Engine::dead().await,
        Engine::always(vec![whole("200 OK", ANSWERED)]).await,
    );
    let fleet = apart(&[&dead, &answering]).await;
    assert_eq!(fleet.client().await.ask(long("")).await.status, 200);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_failed_transfer_is_recovered_before_the_first_byte() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::answering(|request| {
        let is_told = request.contains("kv_transfer_params");
        vec![match is_told {
            true => whole("500 Internal Server Error", LOST),
            false => whole("200 OK", ANSWERED),
        }]
    })
    .await;
    let fleet = apart(&[&computing, &answering]).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    assert_eq!(
        (computing.requests().len(), answering.requests().len()),
        (1, 2)
    );
    fleet.is_idle().await;
    assert_eq!(tokens(&fleet.charged().await), [1, 1009, 30]);
}

#[tokio::test]
async fn an_unreachable_decode_engine_is_replaced() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let (dead, alive) = (
        Engine::dead().await,
        Engine::always(vec![whole("200 OK", ANSWERED)]).await,
    );
    let fleet = apart(&[&computing, &dead, &alive]).await;
    for _ in 0..4 {
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!(
            (answer.status, answer.header("x-quorate-backend")),
            (200, Some("e2"))
        );
    }
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_broken_answer_is_reported_like_any_other() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let steps = vec![stream_head(), chunk(&delta("a", 1)), Step::Close];
    let answering = Engine::always(steps).await;
    let fleet = apart(&[&computing, &answering]).await;
    let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
    assert!(answer.body.contains("\"error\""), "{}", answer.body);
    assert_eq!(computing.requests().len(), 1, "nothing is tried again");
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_disconnect_cancels_prefill_and_is_charged() {
    let computing = Engine::always(vec![Step::Hang]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = apart(&[&computing, &answering]).await;
    let mut client = fleet.client().await;
    client.send(long("")).await;
    eventually("it is computed", || computing.requests().len() == 1).await;
    assert_eq!(fleet.running(), 2, "each of the two has a place for it");
    drop(client);
    eventually("its connection is closed", || computing.abandoned() == 1).await;
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 0), 1);
    assert!(answering.requests().is_empty());
    let [uncached, _, output] = tokens(&fleet.charged().await);
    assert!(uncached > 900 && output == 0, "{uncached} {output}");
}

#[tokio::test]
async fn short_prompts_and_other_paths_use_the_decode_engine_alone() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = apart(&[&computing, &answering]).await;
    let words = "Words of a prompt. ".repeat(220);
    let json = "content-type: application/json\r\n";
    for request in [
        post("/v1/completions", json, r#"{"model":"m","prompt":"short"}"#),
        post(
            "/v1/embeddings",
            json,
            &format!(r#"{{"model":"m","input":"{words}"}}"#),
        ),
        long(",\"n\":2"),
        long(",\"prompt_logprobs\":1"),
    ] {
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    }
    assert!(computing.requests().is_empty());
    fleet.is_idle().await;
}

#[tokio::test]
async fn decision_records_name_both_engines() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = apart(&[&computing, &answering]).await;
    fleet.client().await.ask(long("")).await;
    fleet.is_idle().await;
    let list = "/admin/v1/decisions?backend=e0";
    let (_, listed) = fleet.call("GET", list, &Value::Null).await;
    let last = &listed["decisions"][0]["last"];
    assert_eq!(
        (&last["backend"], &last["prefill"]),
        (&json!("e1"), &json!("e0"))
    );
}
