//! Fuzz targets: parsers of untrusted bytes as functions that must not panic, hang or use unbounded
//! memory on any input. `chaos-tests` uses them. Each function is next to the code that it
//! exercises.

pub use crate::engines::backends::fuzzing::{
    engine_metrics, engine_metrics_seeds, engine_models, engine_models_seeds,
};
pub use crate::engines::discovery::fuzzing::{
    discovery_file, discovery_file_seeds, pod_events, pod_events_seeds,
};
pub use crate::kv_events::fuzzing::{
    endpoint, endpoint_seeds, kv_payload, kv_payload_seeds, kv_stream, kv_stream_seeds, zmtp,
    zmtp_seeds,
};
pub use crate::prompt::fuzzing::{
    chat, chat_seeds, chat_template, chat_template_seeds, tokenizer_file, tokenizer_file_seeds,
};
pub use crate::proxy::fuzzing::{
    answer_document, answer_document_seeds, answer_events, answer_events_seeds, headers,
    headers_seeds, prompt, prompt_seeds,
};
pub use crate::proxy::picker::fuzzing::{gateway_message, gateway_message_seeds};

use state::admission::Backlog;
use state::ids::{BackendRef, Incarnation, ModelKey, ReplicaId, Slot};
use tokio::time::Instant;

use crate::admission::backlog;
use crate::cluster::divergence::Digests;
use crate::routing::LoadTable;

/// Request paths, selected by number.
pub(crate) const PATHS: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/pooling",
    "/tokenize",
    "/elsewhere",
];

/// Selects a path by the first byte and returns it with the rest of the bytes; `None` without
/// bytes.
pub(crate) fn path_of(bytes: &[u8]) -> Option<(&'static str, &[u8])> {
    let (number, rest) = bytes.split_first()?;
    Some((PATHS[usize::from(*number) % PATHS.len()], rest))
}

/// Decodes a peer's message outside the log: one byte for its kind, then a backlog, a load report
/// or a digest claim. An accepted backlog survives another round of encoding and decoding.
pub fn peer_reports(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    match kind % 3 {
        0 => {
            if let Ok(told) = backlog::decode(bytes) {
                assert!(told.len() <= backlog::MODELS_PER_REPORT_MAX);
                assert_eq!(backlog::decode(&backlog::encode(&told)), Ok(told));
            }
        }
        1 => {
            let (table, now) = (LoadTable::default(), Instant::now());
            if table.merge_report(ReplicaId(2), bytes, now).is_ok() {
                let slots = 0..u16::try_from(state::command::BACKENDS_MAX).unwrap_or(u16::MAX);
                for slot in slots.step_by(97) {
                    let _load = table.cluster(backend(slot), now);
                }
            }
        }
        _ => {
            let digests = Digests::default();
            digests.record(4096, 7);
            if digests.receive(ReplicaId(2), bytes).is_ok() {
                digests.judge(&[ReplicaId(1), ReplicaId(2)]);
            }
        }
    }
}

/// Returns valid messages as seeds.
#[must_use]
pub fn peer_reports_seeds() -> Vec<Vec<u8>> {
    let line = |model| {
        let backlog = Backlog {
            priority: -2,
            least_milli: 1 << 40,
            users: 3,
            waiting: 300,
        };
        (ModelKey(model), backlog)
    };
    let table = LoadTable::default();
    let _underway = [0, 5, 900].map(|slot| table.begin(backend(slot), 7000));
    let digests = Digests::default();
    digests.record(4096, 7);
    let claim = digests.message();
    vec![
        [&[0][..], &backlog::encode(&[line(1), line(u64::MAX)])].concat(),
        [&[1][..], &table.local_report()].concat(),
        [&[2][..], claim.as_ref().map_or(&[][..], |claim| claim)].concat(),
    ]
}

fn backend(slot: u16) -> BackendRef {
    BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(1),
    }
}
