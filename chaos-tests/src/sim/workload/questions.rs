//! Questions to a replica of a healed cluster: how it would route requests that nobody sends.

use api::admission::AdmissionRequest as _;
use api::routing::{EarlierAttempts, PermitCell, UserName};
use lab::rng::Rng;
use node::app::replica_core::ReplicaCore;
use serde_json::Value;
use tokio::time::Instant;

use super::chat::{ChatRequest, ChatState};

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
        answer(core, &chat, number)
    });
    asked.collect()
}

fn answer(core: &ReplicaCore, chat: &ChatState, number: u64) -> String {
    let request = ChatRequest {
        model: chat.model,
        user: UserName::bounded(&chat.user),
        id: format!("question-{number}"),
        identity: core.router().reader().identify(&chat.parsed()),
        tokens_max: None,
        priority: 0,
        session: chat.session(),
        permit: PermitCell::new(),
        earlier: EarlierAttempts::default(),
    };
    let ask = request.ask(&[]);
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
