//! Fuzz targets: each wraps a reader of untrusted bytes in a function that must not panic, hang or
//! exceed its memory bound, whatever the input.
//!
//! A [`FuzzTarget`] is such a function with its seeds, which are real encodings. The functions are
//! next to the readers: in `api`, `raft`, `lab` and `node` behind the feature `fuzzing`, and here
//! if the reader is public. `chaos-tests/tests/fuzzing.rs` runs all of them over seeded mutations
//! ([`mutate`]); `chaos-tests/fuzz` runs them under libFuzzer (docs/internals/testing.md).

mod backup;
#[path = "../../../state/tests/common/mod.rs"]
pub(crate) mod fixtures;
pub mod mutate;
mod state;

use mutate::MutationRng;

/// A reader of untrusted bytes, with its seeds and bounds.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Name of the target, also used by cargo-fuzz.
    pub name: &'static str,
    /// Function that reads the bytes. Panics if a property does not hold.
    pub body: fn(&[u8]),
    /// Function that returns the seeds, which are real encodings.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Maximum memory that one run may hold, in bytes.
    pub held_bytes_max: usize,
    /// Number of mutations per seed in the tests. Lower for targets whose runs are slow.
    pub mutations: u32,
}

const MIB: usize = 1 << 20;

impl FuzzTarget {
    const fn new(name: &'static str, body: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self {
            name,
            body,
            seeds,
            held_bytes_max: 32 * MIB,
            mutations: 200,
        }
    }
}

macro_rules! targets {
    ($($name:ident: $body:path, $seeds:path $(, $field:ident = $value:expr)*;)*) => {
        /// All fuzz targets, by crate and name.
        pub static TARGETS: &[FuzzTarget] = &[$(FuzzTarget {
            $($field: $value,)*
            ..FuzzTarget::new(stringify!($name), $body, $seeds)
        },)*];
    };
}

targets! {
    // The codec bounds the memory of a command.
    state_commands: state::commands, state::commands_seeds,
        held_bytes_max = 192 * MIB, mutations = 60;
    state_reply: state::reply, state::reply_seeds;
    state_snapshot: state::snapshot, state::snapshot_seeds,
        held_bytes_max = 512 * MIB, mutations = 60;
    raft_log_record: raft::fuzzing::log_record, raft::fuzzing::log_record_seeds;
    raft_peer_message: raft::fuzzing::peer_message, raft::fuzzing::peer_message_seeds;
    raft_snapshot_file: raft::fuzzing::snapshot_file, raft::fuzzing::snapshot_file_seeds,
        mutations = 60;
    raft_small_file: raft::fuzzing::small_file, raft::fuzzing::small_file_seeds;
    api_prompt: api::fuzzing::prompt, api::fuzzing::prompt_seeds;
    api_chat: api::fuzzing::chat, api::fuzzing::chat_seeds;
    api_chat_template: api::fuzzing::chat_template, api::fuzzing::chat_template_seeds;
    api_tokenizer_file: api::fuzzing::tokenizer_file, api::fuzzing::tokenizer_file_seeds,
        held_bytes_max = 128 * MIB, mutations = 40;
    api_answer_events: api::fuzzing::answer_events, api::fuzzing::answer_events_seeds;
    api_answer_document: api::fuzzing::answer_document, api::fuzzing::answer_document_seeds;
    api_headers: api::fuzzing::headers, api::fuzzing::headers_seeds;
    api_gateway_message: api::fuzzing::gateway_message, api::fuzzing::gateway_message_seeds;
    api_kv_payload: api::fuzzing::kv_payload, api::fuzzing::kv_payload_seeds;
    api_kv_stream: api::fuzzing::kv_stream, api::fuzzing::kv_stream_seeds;
    api_zmtp: api::fuzzing::zmtp, api::fuzzing::zmtp_seeds;
    api_endpoint: api::fuzzing::endpoint, api::fuzzing::endpoint_seeds;
    api_engine_metrics: api::fuzzing::engine_metrics, api::fuzzing::engine_metrics_seeds;
    api_engine_models: api::fuzzing::engine_models, api::fuzzing::engine_models_seeds;
    api_discovery_file: api::fuzzing::discovery_file, api::fuzzing::discovery_file_seeds;
    api_pod_events: api::fuzzing::pod_events, api::fuzzing::pod_events_seeds;
    api_peer_reports: api::fuzzing::peer_reports, api::fuzzing::peer_reports_seeds;
    api_admin_body: admin::fuzzing::admin_body, admin::fuzzing::admin_body_seeds;
    api_backup_file: backup::file, backup::file_seeds;
    node_exchange: node::fuzzing::exchange, node::fuzzing::exchange_seeds;
    node_config: node::fuzzing::config, node::fuzzing::config_seeds, mutations = 60;
    node_import: node::fuzzing::import, node::fuzzing::import_seeds, mutations = 60;
    lab_trace: lab::fuzzing::trace, lab::fuzzing::trace_seeds;
    node_admin_answer: node::fuzzing::admin_answer, node::fuzzing::admin_answer_seeds;
}

/// Returns the target with this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Runs a target over the empty input, its seeds, and `mutations` mutations of each seed.
///
/// Passes every input to `run`, which runs the target and may measure the run.
pub fn sweep(target: &FuzzTarget, seed: u64, mutations: u32, mut run: impl FnMut(&[u8])) {
    let seeds = (target.seeds)();
    let mut numbers = MutationRng::new(seed);
    run(&[]);
    for original in &seeds {
        run(original);
        for _ in 0..mutations {
            run(&mutate::mutated(original, &seeds, &mut numbers));
        }
    }
}
