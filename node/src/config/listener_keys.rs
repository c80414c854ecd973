//! Keys of what the listeners take from outside and pass on: `[admin]`, `[requests]`.

use super::key::Absent::{Default as By, Unset};
use super::key::{Key, Kind, key};

pub(super) const LISTENER_KEYS: &[Key] = &[
    key(
        "admin.hosts",
        Kind::Hosts,
        Unset,
        "Additional host names of the admin listener. IP addresses, `localhost`, the host of `listen.advertise` and the machine's name are always accepted; requests to any other name get a 421 (docs/guide/security.md).",
    ),
    key(
        "requests.extra_paths",
        Kind::Paths,
        Unset,
        "Additional paths to which a POST with a JSON `model` is routed, besides those in docs/guide/security.md. Engines' control routes stay closed.",
    ),
    key(
        "requests.refuse_fields",
        Kind::Names,
        By(
            "kv_transfer_params,ec_transfer_params,bootstrap_host,bootstrap_port,bootstrap_room,custom_logit_processor",
        ),
        "Top-level body fields that make a request fail with a 400.",
    ),
    key(
        "requests.strip_fields",
        Kind::Names,
        By("priority,data_parallel_rank,routed_dp_rank,disagg_prefill_dp_rank"),
        "Top-level body fields that are removed before a request goes to an engine; all other bytes stay as they are.",
    ),
    key(
        "requests.strip_headers",
        Kind::Names,
        By("x-data-parallel-rank,x-override-*,x-vllm-priority"),
        "Headers that are not forwarded to engines. A trailing `*` matches any suffix.",
    ),
];
