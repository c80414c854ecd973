//! Keys of what the listeners take from outside and pass on: `[admin]`, `[requests]`.

use super::keys::Absent::{Default as By, Unset};
use super::keys::{Key, Kind, key};

pub(super) const LISTENER_KEYS: &[Key] = &[
    key(
        "admin.hosts",
        Kind::Hosts,
        Unset,
        "Host names that the admin listener is asked as, beside addresses, `localhost`, the host of `listen.advertise` and the machine's own name; requests to other names get a 421 (docs/guide/security.md).",
    ),
    key(
        "requests.extra_paths",
        Kind::Paths,
        Unset,
        "Paths beside those in docs/guide/security.md to which a POST with a JSON `model` is routed. Engines' control routes stay closed.",
    ),
    key(
        "requests.refuse_fields",
        Kind::Names,
        By(
            "kv_transfer_params,ec_transfer_params,bootstrap_host,bootstrap_port,bootstrap_room,custom_logit_processor",
        ),
        "Fields of a body, at its top level, with which a request gets a 400.",
    ),
    key(
        "requests.strip_fields",
        Kind::Names,
        By("priority,data_parallel_rank,routed_dp_rank,disagg_prefill_dp_rank"),
        "Fields that are taken out of a body before it goes to an engine; the rest keeps its bytes.",
    ),
    key(
        "requests.strip_headers",
        Kind::Names,
        By("x-data-parallel-rank,x-override-*,x-vllm-priority"),
        "Headers that do not reach engines; a last `*` stands for any end of a name.",
    ),
];
