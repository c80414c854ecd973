//! Streams whose engine fails in the middle, and that another engine continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api::proxy::{Charges, RequestOutcome, StreamResume};

use super::client::{Answer, chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head};
use super::fleet::{Fleet, PATIENT, eventually};

pub(super) const STREAM: &str = ",\"stream\":true";
const ROLE: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

/// Returns a chunk of the engine that goes on, whose prompt has `prompt_tokens`.
pub(super) fn next_delta(text: &str, prompt_tokens: u32, completion_tokens: u32) -> String {
    format!(
        "data: {{\"id\":\"d\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}],\
         \"usage\":{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":{completion_tokens}}}}}\n\n"
    )
}

/// Returns the last events of the engine that goes on.
fn next_end() -> [String; 3] {
    [
        "data: {\"id\":\"d\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n".to_owned(),
        "data: {\"id\":\"d\",\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\n".to_owned(),
        DONE.to_owned(),
    ]
}

pub(super) fn is_continued(request: &str) -> bool {
    request.contains("\"continue_final_message\":true")
}

/// Starts an engine that breaks off after `first`, and continues with `rest`.
async fn engine(first: &[&str], rest: &[&str]) -> Engine {
    let owned =
        |events: &[&str]| -> Vec<Step> { events.iter().map(|event| chunk(event)).collect() };
    let (first, rest) = (owned(first), owned(rest));
    Engine::answering(move |request| {
        let mut steps = vec![stream_head()];
        match is_continued(request) {
            false => {
                steps.extend_from_slice(&first);
                steps.push(Step::Close);
            }
            true => {
                steps.extend_from_slice(&rest);
                steps.push(last_chunk());
            }
        }
        steps
    })
    .await
}

/// Starts two equal engines that break off after `first`, and continue with `rest`.
async fn engines(first: &[&str], rest: &[&str]) -> [Engine; 2] {
    [engine(first, rest).await, engine(first, rest).await]
}

async fn pair(first: &[&str], rest: &[&str]) -> ([Engine; 2], Fleet) {
    let engines = engines(first, rest).await;
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    (engines, fleet)
}

pub(super) fn requests(engines: &[Engine]) -> Vec<String> {
    engines.iter().flat_map(Engine::requests).collect()
}

/// Returns the text of a streamed chat.
pub(super) fn text(answer: &Answer) -> String {
    let events = answer
        .body
        .lines()
        .filter_map(|it| it.strip_prefix("data: "));
    let values = events.filter_map(|it| serde_json::from_str::<serde_json::Value>(it).ok());
    let texts = values.filter_map(|it| {
        let choice = &it["choices"][0];
        let text = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        text.map(str::to_owned)
    });
    texts.collect()
}

fn last_error(answer: &Answer) -> serde_json::Value {
    let last = answer.body.trim_end().rsplit("\n\n").next().unwrap();
    let value: serde_json::Value =
        serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    value["error"].clone()
}

#[tokio::test]
async fn a_chat_goes_on_at_another_engine_without_a_seam() {
    let (first, end) = ([ROLE, &delta("a", 1), &delta("b ", 2)], next_end());
    let rest = [
        ROLE.replace("\"c\"", "\"d\""),
        next_delta(" c", 9, 1),
        next_delta("d", 9, 2),
    ];
    let rest: Vec<&str> = rest.iter().chain(&end).map(String::as_str).collect();
    let (engines, fleet) = pair(&first, &rest).await;
    let asked =
        chat(",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"max_tokens\":9");
    let answer = fleet.client().await.ask(asked).await;
    assert_eq!(answer.status, 200);
    assert_eq!(text(&answer), "ab cd");
    assert_eq!(
        answer.body.matches("assistant").count(),
        1,
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("\"id\":\"d\""), "{}", answer.body);
    let usage = r#""usage":{"prompt_tokens":7,"completion_tokens":4}"#;
    assert_eq!(answer.body.matches(usage).count(), 1, "{}", answer.body);
    assert!(answer.body.ends_with(DONE) && answer.is_complete);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 4));
    let asked = requests(&engines);
    assert_eq!(asked.len(), 2);
    let next = asked.iter().find(|it| is_continued(it)).unwrap();
    let body = next.split_once("\r\n\r\n").unwrap().1;
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["max_tokens"], 7);
    let messages = body["messages"].as_array().unwrap();
    let last = messages.last().unwrap();
    assert_eq!(
        *last,
        serde_json::json!({"role": "assistant", "content": "ab"})
    );
}

#[tokio::test]
async fn a_completion_goes_on_behind_its_prompt() {
    let say = |text: &str| {
        format!("data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n")
    };
    let script = move |request: &str| {
        let mut steps = vec![stream_head()];
        if request.contains("\"prompt\":\"say it\"") {
            steps.extend([chunk(&say(" a ")), Step::Close]);
        } else {
            assert!(request.contains("\"prompt\":\"say it a \""), "{request}");
            steps.extend([chunk(&say("b")), chunk(DONE), last_chunk()]);
        }
        steps
    };
    let engines = [
        Engine::answering(script).await,
        Engine::answering(script).await,
    ];
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    let body = r#"{"model":"m","stream":true,"prompt":"say it"}"#;
    let answer = fleet
        .client()
        .await
        .ask(post("/v1/completions", "", body))
        .await;
    assert_eq!(text(&answer), " a b");
    assert!(answer.body.ends_with(DONE));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn a_stream_without_output_begins_again_and_is_charged_once() {
    for before in [vec![], vec![stream_head(), chunk(ROLE)]] {
        let asked = Arc::new(AtomicUsize::new(0));
        let script = move |_: &str| match asked.fetch_add(1, Ordering::SeqCst) {
            0 => before.iter().cloned().chain([Step::Close]).collect(),
            _ => vec![
                stream_head(),
                chunk(&delta("a", 1)),
                chunk(DONE),
                last_chunk(),
            ],
        };
        let engines = [
            Engine::answering(script.clone()).await,
            Engine::answering(script).await,
        ];
        let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
        // Far more text than the engine counts tokens.
        let said = "word ".repeat(200);
        let body = format!(
            r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"{said}"}}]}}"#
        );
        let asked = post("/v1/chat/completions", "", &body);
        let answer = fleet.client().await.ask(asked).await;
        assert_eq!((answer.status, text(&answer)), (200, "a".to_owned()));
        fleet.is_idle().await;
        let requests = engines.each_ref().map(|engine| engine.requests().len());
        assert_eq!(requests, [1, 1]);
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
        let charge = fleet.charged().await;
        let input = charge.input_uncached + charge.input_cached;
        assert_eq!((input, charge.output), (7, 1));
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_continued_ends_with_the_reason() {
    for (fields, first, reason) in [
        (",\"logprobs\":true", vec![delta("a", 1)], "logprobs"),
        (",\"response_format\":{\"type\":\"json_object\"}", vec![delta("{", 1)], "response_format"),
        (
            "",
            vec![
                delta("a", 1),
                "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}}]}\n\n".to_owned(),
            ],
            "only text",
        ),
        (
            "",
            vec!["data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\"hm\"}}]}\n\n".to_owned()],
            "only text",
        ),
        (",\"max_tokens\":1", vec![delta("a", 1)], "maximum length"),
    ] {
        let first: Vec<&str> = first.iter().map(String::as_str).collect();
        let (engines, fleet) = pair(&first, &[DONE]).await;
        let asked = chat(&format!("{STREAM}{fields}"));
        let answer = fleet.client().await.ask(asked).await;
        let error = last_error(&answer);
        assert_eq!(error["code"], "backend_broke");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(reason) && message.contains("again"), "{message}");
        assert_eq!(requests(&engines).len(), 1);
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::BrokenOff, 200), 1);
    }
}

#[tokio::test]
async fn an_engine_that_starts_a_new_message_does_not_continue_the_stream() {
    let first = [delta("a", 1), delta("b", 2)];
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let (_engines, fleet) = pair(&first, &[&next_delta("Hello", 14, 1), DONE]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert_eq!(text(&answer), "ab");
    let error = last_error(&answer);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("did not continue")
    );
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_engine_that_refuses_to_continue_ends_the_stream() {
    let script = |request: &str| match is_continued(request) {
        true => vec![json(
            "400 Bad Request",
            r#"{"error":{"message":"no","code":400}}"#,
        )],
        false => vec![stream_head(), chunk(&delta("a", 1)), Step::Close],
    };
    let engines = [
        Engine::answering(script).await,
        Engine::answering(script).await,
    ];
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    let message = last_error(&answer)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("400"), "{message}");
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 1));
}

#[tokio::test]
async fn a_server_error_within_a_stream_sends_it_on() {
    let oops = "data: {\"error\":{\"message\":\"core failed\",\"code\":500}}\n\n";
    let (first, end) = (
        [&delta("a", 1), &delta("b", 2), oops, DONE].map(str::to_owned),
        next_end(),
    );
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let rest = [next_delta("c", 9, 1)];
    let rest: Vec<&str> = rest.iter().chain(&end).map(String::as_str).collect();
    let (engines, fleet) = pair(&first, &rest).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert_eq!(text(&answer), "abc");
    assert!(!answer.body.contains("core failed"), "{}", answer.body);
    assert_eq!(answer.body.matches(DONE).count(), 1);
    assert_eq!(requests(&engines).len(), 2);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn a_stream_that_lacks_only_its_end_is_completed() {
    let stop = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n";
    let (first, wants) = (
        [&delta("ab", 2), stop].map(str::to_owned),
        ",\"stream_options\":{\"include_usage\":true}",
    );
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let (engines, fleet) = pair(&first, &[]).await;
    let answer = fleet
        .client()
        .await
        .ask(chat(&format!("{STREAM}{wants}")))
        .await;
    assert!(
        answer.body.ends_with(&format!("{stop}{DONE}")),
        "{}",
        answer.body
    );
    assert_eq!(requests(&engines).len(), 1);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn a_stream_that_broke_two_engines_goes_no_further() {
    let text_of_two = [delta("a", 1)];
    let steps = || vec![stream_head(), chunk(&text_of_two[0]), Step::Close];
    let mut engines = Vec::new();
    for _ in 0..3 {
        engines.push(Engine::always(steps()).await);
    }
    let fleet = Fleet::start(&[&engines[0], &engines[1], &engines[2]]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    let message = last_error(&answer)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("two backends"), "{message}");
    assert_eq!(requests(&engines).len(), 2);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_stream_that_stalls_goes_on_elsewhere_if_it_can() {
    for (fields, goes_on) in [("", true), (",\"logprobs\":true", false)] {
        let script = |request: &str| match is_continued(request) {
            true => vec![
                stream_head(),
                chunk(&next_delta("b", 8, 1)),
                chunk(DONE),
                last_chunk(),
            ],
            false => vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
        };
        let engines = [
            Engine::answering(script).await,
            Engine::answering(script).await,
        ];
        let fleet = Fleet::start_with(&[&engines[0], &engines[1]], PATIENT, |settings| {
            settings.streams.stall = Some(Duration::from_millis(20));
            settings.timeouts.answer_idle = Duration::from_millis(200);
        })
        .await;
        let asked = chat(&format!("{STREAM}{fields}"));
        let answer = fleet.client().await.ask(asked).await;
        match goes_on {
            true => assert_eq!(text(&answer), "ab"),
            // It waits as long as any response.
            false => assert_eq!(last_error(&answer)["code"], "backend_timeout"),
        }
        fleet.is_idle().await;
        assert_eq!(requests(&engines).len(), 1 + usize::from(goes_on));
        eventually(
            "the connection to the engine that stalled is closed",
            || engines.iter().map(Engine::abandoned).sum::<usize>() == 1,
        )
        .await;
    }
}

#[tokio::test]
async fn streams_are_not_continued_if_that_is_off() {
    let first = [delta("a", 1)];
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let engines = engines(&first, &[DONE]).await;
    let fleet = Fleet::start_with(&[&engines[0], &engines[1]], PATIENT, |settings| {
        settings.streams.resume = StreamResume::Off;
    })
    .await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert_eq!(last_error(&answer)["code"], "backend_broke");
    eventually("one engine was asked", || requests(&engines).len() == 1).await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn all_streams_of_an_engine_that_is_gone_go_on() {
    const STREAMS: usize = 12;
    let script = |request: &str| match is_continued(request) {
        true => vec![
            stream_head(),
            chunk(&next_delta("b", 8, 1)),
            chunk(DONE),
            last_chunk(),
        ],
        false => vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
    };
    let gone = Engine::answering(script).await;
    let alive = Engine::answering(script).await;
    let fleet = Fleet::start(&[&gone, &alive]).await;
    let mut clients = Vec::new();
    for number in 0..2 * STREAMS {
        let mut client = fleet.client().await;
        client
            .send(chat(&format!("{STREAM},\"seed\":{number}")))
            .await;
        client.read_until("\"a\"").await;
        clients.push(client);
    }
    let moved = gone.requests().len();
    assert!(moved > STREAMS / 2, "{moved} of {STREAMS} streams");
    gone.kill();
    eventually("the streams go on", || {
        alive
            .requests()
            .iter()
            .filter(|it| is_continued(it))
            .count()
            == moved
    })
    .await;
}

#[tokio::test]
async fn a_client_that_received_nothing_gets_the_role_of_the_next_engine() {
    let broken = Arc::new(AtomicUsize::new(0));
    let script = move |_: &str| match broken.fetch_add(1, Ordering::SeqCst) {
        0 => vec![stream_head(), chunk(": ping\n\n"), Step::Close],
        _ => vec![
            stream_head(),
            chunk(ROLE),
            chunk(&delta("a", 1)),
            chunk(DONE),
            last_chunk(),
        ],
    };
    let engines = [
        Engine::answering(script.clone()).await,
        Engine::answering(script).await,
    ];
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    let asked = chat(&format!("{STREAM},\"logprobs\":true"));
    let answer = fleet.client().await.ask(asked).await;
    assert_eq!(
        answer.body.matches("assistant").count(),
        1,
        "{}",
        answer.body
    );
    assert_eq!(text(&answer), "a");
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_completed_stream_waits_for_its_charge_if_charges_are_durable() {
    let stop = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    let engine = engine(&[&delta("ab", 2), stop], &[]).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        settings.charges = Charges::Durable;
    })
    .await;
    fleet.keep_flushing();
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert!(
        answer.body.ends_with(&format!("{stop}{DONE}")),
        "{}",
        answer.body
    );
    assert!(answer.is_complete);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}
