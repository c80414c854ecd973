//! Questions to a replica of a healed cluster: how it would route requests that nobody sends.

use api::prompt::PromptIdentity;
use api::routing::{RequestStages, RoutingRequest, UserName};
use lab::rng::Rng;
use node::app::replica_core::ReplicaCore;
use serde_json::Value;
use tokio::time::Instant;

use super::chat::ChatState;

/// Label of the questions' draws, which separates them from those of clients.
const LABEL: u64 = 0x7175_6573;
/// Number of questions.
const QUESTIONS: u64 = 6;
/// What a replica knows of backends by itself: its own requests, and what it sees of the engines.
const LOCAL: [&str; 7] = [
    "here",
    "cluster",
    "circuit",
    "engine_waiting",
    "engine_running",
    "kv_usage_percent",
    "is_model_listed",
];
/// What follows from a replica's own turn, where the policy takes backends in turn.
const IN_TURN: [&str; 7] = [
    "choice", "matched", "reason", "tier", "score", "then", "would_be",
];

/// Returns the answers of a replica, without what it alone can know. All replicas are asked the same.
/// Call this within the replica's runtime.
pub(in crate::sim) fn answers(core: &ReplicaCore) -> Vec<String> {
    let asked = (0..QUESTIONS).map(|number| {
        let mut rng = Rng::new(LABEL, number);
        let mut chat = ChatState::new(&mut rng);
        chat.says(&mut rng, 50 * number);
        let identity = core.router().reader().identify(&chat.parsed());
        answer(core, &chat, &identity, number)
    });
    asked.collect()
}

fn answer(core: &ReplicaCore, chat: &ChatState, identity: &PromptIdentity, number: u64) -> String {
    let user = UserName::bounded(&chat.user);
    let ask = RoutingRequest {
        model: chat.model,
        identity,
        request_id: &format!("question-{number}"),
        user: &user,
        session: Some(chat.session()),
        headers: None,
        policy: None,
        labels: &[],
        excluded: &[],
        waiting_here: 0,
        client: None,
        endpoints: None,
        stages: RequestStages::Monolithic,
        room: Default::default(),
    };
    let router = core.router();
    let explanation = (router.decider()).explain(&ask, router.outbox().status(), Instant::now());
    let mut shown = serde_json::to_value(explanation).expect("answers have string keys only");
    let takes_turns = !std::mem::take(&mut shown["request"]["turn"]).is_null();
    let hide = |from: &mut Value, names: &[&str]| {
        let members = from.as_object_mut().expect("an object");
        members.retain(|name, _| !names.contains(&name.as_str()));
    };
    let mut hidden = vec!["outbox", "overlay_runs"];
    hidden.extend(IN_TURN.iter().filter(|_| takes_turns));
    hide(&mut shown, &hidden);
    hidden.extend(LOCAL);
    for backend in shown["backends"].as_array_mut().into_iter().flatten() {
        hide(backend, &hidden);
    }
    shown.to_string()
}
