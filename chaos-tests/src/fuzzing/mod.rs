//! Everything that reads foreign bytes, as functions of bytes that must not panic, hang or take memory
//! beyond a bound, whatever they are given.
//!
//! A [`FuzzTarget`] is such a function with seeds: real encodings, from which mutations start. The
//! functions stand where what they read is reachable: in `api`, `raft` and `node` behind the
//! feature `fuzzing`, here where all of it is public. `chaos-tests/tests/fuzzing.rs` runs all of
//! them over seeded mutations ([`mutate`]), `chaos-tests/fuzz` under libFuzzer
//! (docs/internals/testing.md).

mod backup;
pub mod mutate;
mod state;

use mutate::MutationRng;

/// One reader of foreign bytes.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Its name, also of its cargo-fuzz target.
    pub name: &'static str,
    /// Reads the bytes; panics when something does not hold.
    pub body: fn(&[u8]),
    /// Real encodings.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// What one run may hold at once, in bytes.
    pub held_bytes_max: usize,
    /// How many times cheaper or dearer than others a run is: mutations per seed in the tests.
    pub mutations: u32,
}

const MIB: usize = 1 << 20;

const fn target(name: &'static str, body: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> FuzzTarget {
    FuzzTarget {
        name,
        body,
        seeds,
        held_bytes_max: 32 * MIB,
        mutations: 200,
    }
}

/// All targets, by crate and name.
pub static TARGETS: &[FuzzTarget] = &[
    // What a command may take in memory is bounded by the codec.
    FuzzTarget {
        held_bytes_max: 192 * MIB,
        mutations: 60,
        ..target("state_commands", state::commands, state::commands_seeds)
    },
    target("state_reply", state::reply, state::reply_seeds),
    FuzzTarget {
        held_bytes_max: 512 * MIB,
        mutations: 60,
        ..target("state_snapshot", state::snapshot, state::snapshot_seeds)
    },
    target(
        "raft_log_record",
        raft::fuzzing::log_record,
        raft::fuzzing::log_record_seeds,
    ),
    target(
        "raft_peer_message",
        raft::fuzzing::peer_message,
        raft::fuzzing::peer_message_seeds,
    ),
    FuzzTarget {
        mutations: 60,
        ..target(
            "raft_snapshot_file",
            raft::fuzzing::snapshot_file,
            raft::fuzzing::snapshot_file_seeds,
        )
    },
    target(
        "raft_small_file",
        raft::fuzzing::small_file,
        raft::fuzzing::small_file_seeds,
    ),
    target(
        "api_prompt",
        api::fuzzing::prompt,
        api::fuzzing::prompt_seeds,
    ),
    target("api_chat", api::fuzzing::chat, api::fuzzing::chat_seeds),
    target(
        "api_chat_template",
        api::fuzzing::chat_template,
        api::fuzzing::chat_template_seeds,
    ),
    FuzzTarget {
        held_bytes_max: 128 * MIB,
        mutations: 40,
        ..target(
            "api_tokenizer_file",
            api::fuzzing::tokenizer_file,
            api::fuzzing::tokenizer_file_seeds,
        )
    },
    target(
        "api_answer_events",
        api::fuzzing::answer_events,
        api::fuzzing::answer_events_seeds,
    ),
    target(
        "api_answer_document",
        api::fuzzing::answer_document,
        api::fuzzing::answer_document_seeds,
    ),
    target(
        "api_headers",
        api::fuzzing::headers,
        api::fuzzing::headers_seeds,
    ),
    target(
        "api_kv_payload",
        api::fuzzing::kv_payload,
        api::fuzzing::kv_payload_seeds,
    ),
    target(
        "api_kv_stream",
        api::fuzzing::kv_stream,
        api::fuzzing::kv_stream_seeds,
    ),
    target("api_zmtp", api::fuzzing::zmtp, api::fuzzing::zmtp_seeds),
    target(
        "api_endpoint",
        api::fuzzing::endpoint,
        api::fuzzing::endpoint_seeds,
    ),
    target(
        "api_engine_metrics",
        api::fuzzing::engine_metrics,
        api::fuzzing::engine_metrics_seeds,
    ),
    target(
        "api_engine_models",
        api::fuzzing::engine_models,
        api::fuzzing::engine_models_seeds,
    ),
    target(
        "api_peer_reports",
        api::fuzzing::peer_reports,
        api::fuzzing::peer_reports_seeds,
    ),
    target(
        "api_admin_body",
        api::fuzzing::admin_body,
        api::fuzzing::admin_body_seeds,
    ),
    target("api_backup_file", backup::file, backup::file_seeds),
    target(
        "node_exchange",
        node::fuzzing::exchange,
        node::fuzzing::exchange_seeds,
    ),
    FuzzTarget {
        mutations: 60,
        ..target(
            "node_config",
            node::fuzzing::config,
            node::fuzzing::config_seeds,
        )
    },
    target("lab_trace", lab::fuzzing::trace, lab::fuzzing::trace_seeds),
    target(
        "node_admin_answer",
        node::fuzzing::admin_answer,
        node::fuzzing::admin_answer_seeds,
    ),
];

/// The target of a name.
#[must_use]
pub fn named(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Runs a target over its seeds as they are and over `mutations` mutations of each.
///
/// `run` is handed every input, and runs it; it may measure what that takes.
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
