//! Sessions of agents: limits of their trees, and sessions behind a gateway.

use std::sync::Arc;

use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use state::prefix::user_key;
use state::quotas::UserLimits;
use state::trees::session_key;
use tokio::sync::Semaphore;

use super::admission::{all_answered, assert_refused, chat_of, gated, limited, run};
use super::engine::{DONE, Engine, delta, json, usage_chunk};
use super::picking::{CHAT, engines, head, headers, start, upload};

const OF_AGENT: &str = "x-quorate-session: agent\r\n";
const OF_CHILD: &str = "x-quorate-session: child\r\nx-quorate-parent-session: agent\r\n";
const OF_OTHER: &str = "x-quorate-session: other\r\n";

#[tokio::test]
async fn an_agent_runs_as_many_requests_at_once_as_its_tree_may() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = gated(&gate).await;
    let limits = UserLimits {
        concurrent_per_tree: Some(2),
        ..UserLimits::default()
    };
    let fleet = limited(&engine, limits).await;
    let mut client = fleet.client().await;
    // The log need not know of the tree.
    let running = vec![
        run(&fleet, &chat_of("a", OF_CHILD)).await,
        run(&fleet, &chat_of("a", OF_AGENT)).await,
    ];
    let refused = client.ask(chat_of("a", OF_CHILD)).await;
    assert_refused(&refused, 429, "rate_limit_exceeded");
    assert!(refused.body.contains("session's tree"), "{}", refused.body);
    // Neither another agent of the user nor another user's agent of this name is of the tree.
    let others = vec![
        run(&fleet, &chat_of("a", OF_OTHER)).await,
        run(&fleet, &chat_of("b", OF_AGENT)).await,
    ];
    gate.add_permits(5);
    all_answered(running, 200).await;
    all_answered(others, 200).await;
    fleet.is_idle().await;
    assert_eq!(client.ask(chat_of("a", OF_CHILD)).await.status, 200);
}

#[tokio::test]
async fn an_agent_uses_at_most_the_tokens_of_its_tree() {
    let usage = r#"{"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
    let engine = Engine::always(vec![json("200 OK", usage)]).await;
    let limits = UserLimits {
        tokens_per_tree: Some(30),
        ..UserLimits::default()
    };
    let fleet = limited(&engine, limits).await;
    let mut client = fleet.client().await;
    for headers in [OF_AGENT, OF_CHILD] {
        assert_eq!(client.ask(chat_of("a", headers)).await.status, 200);
        fleet.flush().await;
    }
    let refused = client.ask(chat_of("a", OF_AGENT)).await;
    assert_refused(&refused, 429, "rate_limit_exceeded");
    assert_eq!(client.ask(chat_of("a", OF_OTHER)).await.status, 200);
    assert_eq!(client.ask(chat_of("a", "")).await.status, 200);
}

#[tokio::test]
async fn a_picked_turn_belongs_to_the_session_that_the_client_named() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let ProcessingMessage::RequestHeaders(mut head) = head() else {
        panic!("a request begins with its head");
    };
    let named = headers(&[("x-session-id", "child"), ("x-parent-session-id", "agent")]);
    head.headers
        .get_or_insert_default()
        .headers
        .extend(named.headers);
    let mut talk = picking.open();
    talk.say(ProcessingMessage::RequestHeaders(head)).await;
    talk.say(upload(CHAT, true)).await;
    talk.answering().await;
    talk.answer(&[&delta("a", 1), usage_chunk(), DONE]).await;
    talk.streamed().await;
    drop(talk);
    fleet.is_idle().await;
    fleet.flush().await;
    let trees = fleet.router.view().trees();
    let (key, session) = trees.sessions().next().expect("it has begun");
    assert_eq!((session.turns, trees.counts()), (1, (1, 1)));
    let user = user_key(fleet.registry().hash_seed, "ada");
    let of = |name: &str| session_key(fleet.registry().hash_seed, user, name.as_bytes());
    assert_eq!((key, session.parent), (of("child"), Some(of("agent"))));
}
