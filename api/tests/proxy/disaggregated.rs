//! Requests on two engines: one computes the prompt, the other answers. The engines exchange the
//! prompt's blocks in one of two ways, and what holds for both is tested with both.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::engines::backends::BOOTSTRAP_PORT_LABEL;
use api::proxy::RequestOutcome;
use serde_json::{Value, json};
use state::command::{BackendRole, BackendSpec, Charge, Command};
use tokio::sync::Semaphore;

use self::Exchange::{Fetch, Room};
use super::client::{Answer, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json as whole, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const COMPUTED: &str = r#"{"id":"p","choices":[{"index":0,"text":"y"}],"usage":{"prompt_tokens":1010,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":400}},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8],"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600}}"#;
const ANSWERED: &str = r#"{"id":"d","choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1010,"completion_tokens":30,"prompt_tokens_details":{"cached_tokens":1009}}}"#;
const LOST: &str = r#"{"error":{"message":"KV load failed"}}"#;
/// Tokens charged if the prefill engine reports [`COMPUTED`] and the other one [`ANSWERED`]:
/// uncached, cached, output.
const CHARGED: [u64; 3] = [610, 400, 30];
const BOTH: BackendRole = BackendRole::Both;
const PREFILL: BackendRole = BackendRole::Prefill;
const DECODE: BackendRole = BackendRole::Decode;

/// How the engines of a pair exchange the blocks of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exchange {
    /// The decode engine fetches what the prefill engine has computed, as with vLLM's NIXL connector.
    Fetch,
    /// Both receive the request at once and meet in a bootstrap room, as in SGLang.
    Room,
}

impl Exchange {
    /// Starts a fleet of engines with these roles.
    async fn fleet(self, engines: &[(&Engine, BackendRole)]) -> Fleet {
        let all: Vec<&Engine> = engines.iter().map(|(engine, _)| *engine).collect();
        let fleet = Fleet::start(&all).await;
        for (number, (engine, role)) in engines.iter().enumerate() {
            put(&fleet, number, engine, *role, self == Room);
        }
        fleet
    }

    /// Starts a prefill and a decode engine that run these steps for every request.
    async fn pair(self, computing: Vec<Step>, answering: Vec<Step>) -> (Engine, Engine, Fleet) {
        let computing = Engine::always(computing).await;
        let answering = Engine::always(answering).await;
        let engines = [(&computing, PREFILL), (&answering, DECODE)];
        let fleet = self.fleet(&engines).await;
        (computing, answering, fleet)
    }
}

fn put(fleet: &Fleet, number: usize, engine: &Engine, role: BackendRole, has_rooms: bool) {
    let label = has_rooms.then(|| (BOOTSTRAP_PORT_LABEL.to_owned(), "9001".to_owned()));
    fleet.apply(Command::PutBackend(BackendSpec {
        labels: label.into_iter().collect(),
        role,
        ..engine.spec(number)
    }));
}

fn computed() -> Vec<Step> {
    vec![whole("200 OK", COMPUTED)]
}

fn answered() -> Vec<Step> {
    vec![whole("200 OK", ANSWERED)]
}

/// Returns an event stream that ends properly, or is cut off after its first token.
fn streamed(is_cut_off: bool) -> Vec<Step> {
    let end = match is_cut_off {
        true => vec![Step::Close],
        false => vec![chunk(DONE), last_chunk()],
    };
    [vec![stream_head(), chunk(&delta("a", 1))], end].concat()
}

fn asking(path: &str, body: &str) -> String {
    post(path, "content-type: application/json\r\n", body)
}

/// Returns a completion request with a prompt of several blocks.
fn long(fields: &str) -> String {
    let words = "Words of a prompt. ".repeat(220);
    let body = format!(r#"{{"model":"m","prompt":"{words}","max_tokens":30{fields}}}"#);
    asking("/v1/completions", &body)
}

/// Returns the body of a request that an engine received.
fn body(engine: &Engine, nth: usize) -> Value {
    let request = &engine.requests()[nth];
    let (_, body) = request.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap()
}

fn room(engine: &Engine, nth: usize) -> Value {
    body(engine, nth)["bootstrap_room"].clone()
}

/// Returns the status of a response, and the engines that computed the prompt and the output.
fn answered_by(answer: &Answer) -> (u16, Option<&str>, Option<&str>) {
    let prefill = answer.header("x-quorate-prefill");
    (answer.status, prefill, answer.header("x-quorate-backend"))
}

async fn charged(fleet: &Fleet) -> [u64; 3] {
    fleet.is_idle().await;
    let Charge {
        input_uncached,
        input_cached,
        output,
        ..
    } = fleet.charged().await;
    [input_uncached, input_cached, output]
}

#[tokio::test]
async fn a_pair_serves_a_request_that_is_charged_once() {
    for exchange in [Fetch, Room] {
        // In a room, the prefill engine ends only after the other one has received the request.
        let gate = Arc::new(Semaphore::new(usize::from(exchange == Fetch)));
        let steps = [vec![Step::Await(Arc::clone(&gate))], computed()].concat();
        let (computing, answering, fleet) = exchange.pair(steps, answered()).await;
        let mut client = fleet.client().await;
        client.send(long("")).await;
        if exchange == Room {
            eventually("it is there", || answering.requests().len() == 1).await;
            gate.add_permits(1);
        }
        let answer = client.answer().await;
        assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
        assert_eq!(answer.body, ANSWERED, "as the engine sent it");
        let [asked, got] = [&computing, &answering].map(|engine| body(engine, 0));
        assert_eq!(got["max_tokens"], 30);
        match exchange {
            Fetch => {
                assert_eq!(asked["max_tokens"], 1);
                assert_eq!(asked["stream"], false);
                assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], true);
                let report: Value = serde_json::from_str(COMPUTED).unwrap();
                assert_eq!(got["kv_transfer_params"], report["kv_transfer_params"]);
                assert_eq!(asked["prompt"], got["prompt"]);
            }
            Room => {
                assert_eq!(asked, got);
                assert_eq!(got["bootstrap_host"], "127.0.0.1");
                assert_eq!(got["bootstrap_port"], 9001);
                assert!(got["bootstrap_room"].is_u64(), "{got}");
            }
        }
        // The tokens that the prefill engine found cached count as cached.
        assert_eq!(charged(&fleet).await, CHARGED);
    }
}

/// The engines share a KV store, and their connector returns no transfer parameters. The decode
/// engine finds in its cache what the prefill engine computed for the same request.
#[tokio::test]
async fn the_engine_that_computed_more_is_charged_without_a_transfer() {
    let (computed, _) = COMPUTED.split_once(",\"kv_transfer_params\"").unwrap();
    let computed = format!("{computed}}}");
    // vLLM has no details where nothing was cached.
    let cold = computed.replace("{\"cached_tokens\":400}", "null");
    for (computed, cached_by_decode, expected) in [
        (&computed, 1009, CHARGED),
        (&computed, 100, [910, 100, 30]),
        (&cold, 1009, [1010, 0, 30]),
    ] {
        let answered = ANSWERED.replace("1009", &cached_by_decode.to_string());
        let [computing, answering] = [computed, &answered].map(|it| vec![whole("200 OK", it)]);
        let (_, _, fleet) = Fetch.pair(computing, answering).await;
        assert_eq!(fleet.client().await.ask(long("")).await.status, 200);
        assert_eq!(charged(&fleet).await, expected);
    }
}

#[tokio::test]
async fn a_stream_comes_from_the_decode_engine() {
    let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":1010,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":10}}}"#;
    for exchange in [Fetch, Room] {
        let steps = match exchange {
            Fetch => computed(),
            Room => vec![
                stream_head(),
                chunk(&format!("{usage}\n\n")),
                chunk(DONE),
                last_chunk(),
            ],
        };
        let (computing, answering, fleet) = exchange.pair(steps, streamed(false)).await;
        // The decode engine would find a second prompt that it fetched in its own cache.
        let requests = match exchange {
            Fetch => 1,
            Room => 2,
        };
        for _ in 0..requests {
            let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
            assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
            assert!(answer.body.contains("[DONE]") && answer.is_complete);
            let text = &answer.body;
            assert!(text.contains("\"a\"") && !text.contains("1010"), "{text}");
        }
        let [asked, got] = [&computing, &answering].map(|engine| body(engine, 0));
        assert_eq!(got["stream"], true);
        assert_eq!(got["stream_options"]["include_usage"], true);
        match exchange {
            Fetch => {
                assert_eq!(asked["stream"], false);
                assert_eq!(asked.get("stream_options"), None);
            }
            Room => assert_ne!(room(&answering, 0), room(&answering, 1)),
        }
        fleet.is_idle().await;
    }
}

/// Returns a response whose body is cut off.
fn cut_off() -> Vec<Step> {
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_vec();
    vec![Step::Send(head), Step::Close]
}

#[tokio::test]
async fn the_decode_engine_computes_the_prompt_if_it_cannot_fetch_it() {
    let hidden = r#"{"id":"p","usage":{"prompt_tokens":9},"kv_transfer_params":null}"#;
    let by_decode = [1, 1009, 30];
    // The prefill engine has answered that it computed the prompt, and found nothing cached.
    let by_prefill = [1010, 0, 30];
    for (steps, expected) in [
        (vec![whole("500 Internal Server Error", "{}")], by_decode),
        (vec![whole("429 Too Many Requests", "{}")], by_decode),
        (vec![whole("400 Bad Request", "{}")], by_decode),
        (vec![whole("200 OK", hidden)], by_prefill),
        (vec![whole("200 OK", "no JSON")], by_prefill),
        (vec![Step::Close], by_decode),
        (cut_off(), by_decode),
    ] {
        let (computing, answering, fleet) = Fetch.pair(steps, answered()).await;
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
        let requests = [&computing, &answering].map(|engine| engine.requests().len());
        assert_eq!(requests, [1, 1]);
        assert_eq!(body(&answering, 0).get("kv_transfer_params"), None);
        assert_eq!(charged(&fleet).await, expected);
    }
    let (dead, answering) = (Engine::dead().await, Engine::always(answered()).await);
    let fleet = Fetch.fleet(&[(&dead, PREFILL), (&answering, DECODE)]).await;
    assert_eq!(fleet.client().await.ask(long("")).await.status, 200);
    fleet.is_idle().await;

    // The transfer fails.
    let computing = Engine::always(computed()).await;
    let answering = Engine::answering(|request| {
        let is_fetched = request.contains("kv_transfer_params");
        vec![match is_fetched {
            true => whole("500 Internal Server Error", LOST),
            false => whole("200 OK", ANSWERED),
        }]
    })
    .await;
    let engines = [(&computing, PREFILL), (&answering, DECODE)];
    let fleet = Fetch.fleet(&engines).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    let requests = [&computing, &answering].map(|engine| engine.requests().len());
    assert_eq!(requests, [1, 2]);
    assert_eq!(charged(&fleet).await, by_decode);
}

/// Starts two engines with common steps: those in `first` for their first request, and those in
/// `rest` for all later ones.
async fn two(first: Vec<Step>, rest: Vec<Step>) -> [Engine; 2] {
    let count = Arc::new(AtomicUsize::new(0));
    let engine = || {
        let (count, first, rest) = (Arc::clone(&count), first.clone(), rest.clone());
        Engine::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
            0 => first.clone(),
            _ => rest.clone(),
        })
    };
    [engine().await, engine().await]
}

#[tokio::test]
async fn a_prefill_engine_that_fails_in_a_room_is_replaced_in_another_room() {
    let error = "data: {\"error\":{\"message\":\"KV transfer failed\",\"code\":500}}\n\n";
    for (failure, fields) in [
        (vec![whole("500 Internal Server Error", "{}")], ""),
        (vec![whole("503 Service Unavailable", "{}")], ""),
        (vec![Step::Close], ""),
        (cut_off(), ""),
        (
            vec![stream_head(), chunk(error), last_chunk()],
            ",\"stream\":true",
        ),
    ] {
        // The engine that is called first fails once the other one has the request.
        let gate = Arc::new(Semaphore::new(0));
        let steps = [vec![Step::Await(Arc::clone(&gate))], failure].concat();
        let [one, other] = two(steps, computed()).await;
        let answering = Engine::start(|number| match number {
            0 => vec![Step::Hang],
            _ => answered(),
        })
        .await;
        let engines = [(&one, PREFILL), (&other, PREFILL), (&answering, DECODE)];
        let fleet = Room.fleet(&engines).await;
        let mut client = fleet.client().await;
        client.send(long(fields)).await;
        eventually("it is there", || answering.requests().len() == 1).await;
        gate.add_permits(1);
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
        assert_eq!((one.requests().len(), other.requests().len()), (1, 1));
        eventually("the first room is left", || answering.abandoned() == 1).await;
        assert_ne!(room(&answering, 0), room(&answering, 1));
        assert_eq!(charged(&fleet).await, CHARGED);
    }
}

#[tokio::test]
async fn without_another_prefill_engine_the_client_gets_the_failure() {
    for (steps, status, code) in [
        (vec![whole("500 Internal Server Error", "{}")], 500, None),
        (vec![Step::Close], 502, Some("backend_broke")),
    ] {
        let (_, _, fleet) = Room.pair(steps, vec![Step::Hang]).await;
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(body["error"]["code"].as_str(), code);
        assert_eq!(charged(&fleet).await, [0; 3]);
    }
    let (dead, answering) = (Engine::dead().await, Engine::always(vec![Step::Hang]).await);
    let fleet = Room.fleet(&[(&dead, PREFILL), (&answering, DECODE)]).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_request_that_a_prefill_engine_refuses_is_not_sent_again() {
    let refusal = r#"{"object":"error","message":"max_tokens is too large","code":400}"#;
    let refused = vec![whole("400 Bad Request", refusal)];
    let [one, other] = two(refused.clone(), refused).await;
    let answering = Engine::always(vec![Step::Hang]).await;
    let engines = [(&one, PREFILL), (&other, PREFILL), (&answering, DECODE)];
    let fleet = Room.fleet(&engines).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (400, refusal));
    assert_eq!(one.requests().len() + other.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_unreachable_decode_engine_is_replaced_before_the_first_byte() {
    for exchange in [Fetch, Room] {
        let computing = Engine::always(computed()).await;
        let (dead, alive) = (Engine::dead().await, Engine::always(answered()).await);
        let engines = [(&computing, PREFILL), (&dead, DECODE), (&alive, DECODE)];
        let fleet = exchange.fleet(&engines).await;
        for _ in 0..4 {
            let answer = fleet.client().await.ask(long("")).await;
            let backend = answer.header("x-quorate-backend");
            assert_eq!((answer.status, backend), (200, Some("e2")));
        }
        fleet.is_idle().await;
    }
    // A server error of an engine that has the prompt, as after a failed transfer.
    let [one, other] = two(vec![whole("500 Internal Server Error", "{}")], answered()).await;
    let [first, second] = two(computed(), computed()).await;
    let engines = [
        (&first, PREFILL),
        (&second, PREFILL),
        (&one, DECODE),
        (&other, DECODE),
    ];
    let fleet = Room.fleet(&engines).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_ends_with_an_error() {
    for exchange in [Fetch, Room] {
        let (_computing, _answering, fleet) = exchange.pair(computed(), streamed(true)).await;
        let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
        assert!(answer.body.contains("\"error\""), "{}", answer.body);
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_all_connections_and_pays_for_the_prompt() {
    for exchange in [Fetch, Room] {
        let hang = || vec![Step::Hang];
        let (computing, answering, fleet) = exchange.pair(hang(), hang()).await;
        let engines = match exchange {
            Fetch => 1,
            Room => 2,
        };
        let requests = || computing.requests().len() + answering.requests().len();
        let abandoned = || computing.abandoned() + answering.abandoned();
        let mut client = fleet.client().await;
        client.send(long("")).await;
        eventually("the engines have it", || requests() == engines).await;
        assert_eq!(fleet.running(), 2, "each of the two has a place for it");
        drop(client);
        eventually("all are closed", || abandoned() == engines).await;
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::ClientLeft, 0), 1);
        assert_eq!(requests(), engines);
        let [uncached, _, output] = charged(&fleet).await;
        assert!(uncached > 900 && output == 0, "{uncached} {output}");
    }
}

#[tokio::test]
async fn short_prompts_and_other_paths_go_to_the_decode_engine_alone() {
    let (computing, _, fleet) = Fetch.pair(computed(), answered()).await;
    let words = "Words of a prompt. ".repeat(220);
    for request in [
        asking("/v1/completions", r#"{"model":"m","prompt":"short"}"#),
        asking(
            "/v1/embeddings",
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
async fn no_request_goes_to_one_engine_of_a_room_alone() {
    let (computing, answering, fleet) = Room.pair(computed(), answered()).await;
    let short = || asking("/v1/completions", r#"{"model":"m","prompt":"short"}"#);
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"n":2}"#;
    let several = r#"{"model":"m","prompt":["a","b","c"]}"#;
    let requests = [
        (short(), json!(null)),
        (long(",\"prompt_logprobs\":1"), json!(null)),
        (asking("/v1/chat/completions", chat), json!(2)),
        (asking("/v1/completions", several), json!(3)),
    ];
    for (number, (request, rooms)) in requests.into_iter().enumerate() {
        let answer = fleet.client().await.ask(request).await;
        let engines = (200, Some("e0"), Some("e1"));
        assert_eq!(answered_by(&answer), engines, "{number}");
        let count = room(&computing, number).as_array().map(Vec::len);
        assert_eq!(json!(count), rooms);
    }
    let embed = asking("/v1/embeddings", r#"{"model":"m","input":"a"}"#);
    let respond = asking("/v1/responses", r#"{"model":"m","input":"a"}"#);
    for request in [embed.clone(), respond] {
        let answer = fleet.client().await.ask(request).await;
        answer.refuses(400, "needs_whole_backend");
    }
    // Either engine can answer requests that compute nothing.
    let tokenize = asking("/tokenize", r#"{"model":"m","prompt":"a"}"#);
    let answer = fleet.client().await.ask(tokenize).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    let requests = [&computing, &answering].map(|engine| engine.requests().len());
    assert_eq!(requests, [4, 5]);

    // With another engine that serves whole requests, short or inseparable requests go there.
    let all = Engine::always(answered()).await;
    put(&fleet, 2, &all, BOTH, false);
    fleet.assume_healthy();
    for request in [short(), embed] {
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(answered_by(&answer), (200, None, Some("e2")));
    }
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
    fleet.is_idle().await;
}

#[tokio::test]
async fn engines_of_different_kinds_make_no_pair() {
    let (computing, answering, fleet) = Room.pair(computed(), answered()).await;
    // Without the label it counts as a vLLM engine.
    put(&fleet, 0, &computing, PREFILL, false);
    let answer = fleet.client().await.ask(long("")).await;
    answer.refuses(503, "no_prefill_backend");
    assert!(computing.requests().is_empty() && answering.requests().is_empty());
    put(&fleet, 0, &computing, PREFILL, true);
    put(&fleet, 1, &answering, DECODE, false);
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    fleet.is_idle().await;
}

#[tokio::test]
async fn without_a_prefill_engine_a_decode_engine_with_rooms_gets_no_request() {
    let answering = Engine::always(answered()).await;
    let fleet = Room.fleet(&[(&answering, DECODE)]).await;
    let answer = fleet.client().await.ask(long("")).await;
    answer.refuses(503, "no_prefill_backend");
    put(&fleet, 0, &answering, PREFILL, true);
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answer.status, 503);
    assert!(answering.requests().is_empty());
}

#[tokio::test]
async fn the_record_of_a_decision_names_both_engines() {
    for exchange in [Fetch, Room] {
        let (_, _, fleet) = exchange.pair(computed(), answered()).await;
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
}
