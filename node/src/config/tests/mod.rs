//! Tests of rendered errors, the precedence of layers, `config print` and `config schema`.

use std::time::Duration;

use expect_test::{Expect, expect, expect_file};
use state::admission::{AdmissionSettings, Concurrency, Order};
use state::ids::ReplicaId;

use super::*;

mod command_line;
mod discovery;
mod engines;
mod names;
mod policies;
mod sessions;
mod shapes;
mod users;

fn layers<'a>(
    file: &'a str,
    variables: &'a [(String, String)],
    flags: &'a [String],
) -> Result<Loaded, ConfigErrors> {
    let layers = Layers {
        file,
        variables,
        flags,
        backends: &[],
    };
    read("n1.toml", &layers)
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect()
}

fn config(file: &str) -> Config {
    layers(file, &[], &[])
        .unwrap_or_else(|faults| panic!("{faults}"))
        .config
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "reads like the macro that makes it"
)]
fn refused(file: &str, expected: Expect) {
    let faults = layers(file, &[], &[]).expect_err("the config must be refused");
    expected.assert_eq(&faults.render(false, Some(100)));
}

/// Formats errors without excerpts, as `place: message (expected ...)`.
fn brief(faults: &ConfigErrors) -> String {
    let mut out = String::new();
    for fault in &faults.errors {
        let place = match &fault.place {
            Place::File(span) => {
                let (line, column) = error::line_and_column(&faults.text, span.start);
                format!("{line}:{column}")
            }
            Place::Variable(name) => name.clone(),
            Place::Flag(flag) => format!("--set {flag}"),
            Place::Backend(url) => format!("--backend {url}"),
            Place::Nowhere => "-".to_owned(),
        };
        out.push_str(&format!(
            "{place}: {} (expected {})\n",
            fault.message, fault.expected
        ));
    }
    out
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "reads like the macro that makes it"
)]
fn faults(file: &str, expected: Expect) {
    let faults = layers(file, &[], &[]).expect_err("the config must be refused");
    expected.assert_eq(&brief(&faults));
}

#[test]
fn a_single_line_is_a_valid_config() {
    let config = config("node.id = 3");
    assert_eq!(config.id, ReplicaId(3));
    assert_eq!(config.formation, Formation::Alone);
    assert_eq!(config.listen.host(), "127.0.0.1");
    assert_eq!(config.limits.body_bytes_max, 32 << 20);
    assert_eq!(
        config.policy,
        PolicyConfig::Cost(state::policy::CostSettings::default())
    );
    assert_eq!(config.models.len(), 1);
}

#[test]
fn trusted_proxies_are_addresses() {
    let wrong = "node.id = 3\n[users]\ntrusted_proxies = [\"10.0.0.0/8\", \"lb\"]";
    faults(
        wrong,
        expect![[r#"
            3:34: users.trusted_proxies[1] is "lb" (expected an IP address or prefix, such as "10.0.0.0/8")
        "#]],
    );
}

#[test]
fn every_config_error_is_reported_with_its_line() {
    refused(
        r#"[node]
id = 300
data_dir = ""

[listen]
data = "localhost"

[cluster]
flush_intervall = "20ms"
heartbeat = 50

[[backends]]
id = "gpu-1"
url = "ftp://10.0.1.1:8000"
"#,
        expect![[r#"
            error: node.id is 300
             --> n1.toml:2:6
              |
            2 | id = 300
              |      ^^^ expected an integer from 1 to 255, or "from-hostname"

            error: node.data_dir is ""
             --> n1.toml:3:12
              |
            3 | data_dir = ""
              |            ^^ expected non-empty text

            error: listen.data is "localhost"
             --> n1.toml:6:8
              |
            6 | data = "localhost"
              |        ^^^^^^^^^^^ expected an IP address with a port, such as "127.0.0.1:8080"

            error: unknown key cluster.flush_intervall
             --> n1.toml:9:1
              |
            9 | flush_intervall = "20ms"
              | ^^^^^^^^^^^^^^^ expected flush_interval, or another of authentication_optional, auto_promote, bootstrap_expect, election_timeout, flush_interval, heartbeat, join, name, peers, peers_dns, replace_lost, secret_file, snapshot_every, statefulset

            error: cluster.heartbeat is 50
              --> n1.toml:10:13
               |
            10 | heartbeat = 50
               |             ^^ expected a duration from 1ms to 1day, such as "20ms" or "1m 30s"

            error: backends[0].url is "ftp://10.0.1.1:8000"
              --> n1.toml:14:7
               |
            14 | url = "ftp://10.0.1.1:8000"
               |       ^^^^^^^^^^^^^^^^^^^^^ expected a URL, such as "http://10.0.1.1:8000" or "https://gpu-1/prefix"

            n1.toml: 6 faults
        "#]],
    );
}

#[test]
fn a_missing_value_is_reported_without_a_line() {
    refused(
        "",
        expect![[r#"
            error: node.id is not set
             |
             = help: expected an integer from 1 to 255, or "from-hostname"

            n1.toml: 1 fault
        "#]],
    );
}

#[test]
fn toml_syntax_errors_are_reported_with_errors_of_valid_lines() {
    refused(
        "[node]\nid = 300\n[listen\ndata = 5\n",
        expect![[r#"
            error: node.id is 300
             --> n1.toml:2:6
              |
            2 | id = 300
              |      ^^^ expected an integer from 1 to 255, or "from-hostname"

            error: unclosed table
             --> n1.toml:3:8
              |
            3 | [listen
              |        ^ expected `]`

            n1.toml: 2 faults
        "#]],
    );
}

#[test]
fn values_of_wrong_type_or_out_of_bounds_are_reported() {
    faults(
        r#"
models = 5
[node]
id = "one"
[cluster]
peers = ["a:1", "b", 7]
bootstrap_expect = 0
election_timeout = "300ms..150ms"
[limits]
max_body = -1
[retry]
statuses = [503, 200]
[users]
identify_by = ["api_key", "cookie:x"]
[log]
format = "xml"
level = "info,raft=loud"
listen = 5
"#,
        expect![[r#"
            2:10: models is 5 (expected a list of tables: [[models]])
            4:6: node.id is "one" (expected an integer from 1 to 255, or "from-hostname")
            6:17: cluster.peers[1] is "b" (expected a host with a port, such as "10.0.0.1:8082")
            6:22: cluster.peers[2] is 7 (expected a host with a port, such as "10.0.0.1:8082")
            7:20: cluster.bootstrap_expect is 0 (expected an integer from 1 to 255)
            8:20: cluster.election_timeout is "300ms..150ms" (expected two durations from 1ms to 1day, the shorter first, such as "150ms..300ms")
            10:12: limits.max_body is -1 (expected a size in bytes above zero, such as "32MiB")
            12:18: retry.statuses[1] is 200 (expected an HTTP status from 400 to 599)
            14:27: users.identify_by[1] is "cookie:x" (expected "api_key", "body:user" or "header:NAME" with a header's name)
            16:10: log.format is "xml" (expected "text" or "json")
            17:9: log.level is "info,raft=loud" (expected error, warn, info, debug, trace, or a filter such as "info,raft=debug")
            18:1: unknown key log.listen (expected one of access, format, level)
        "#]],
    );
}

#[test]
fn unknown_keys_and_values_are_refused() {
    faults(
        r#"
[node]
id = 1
[routing]
policy = "dlpm"
[routing.dlpm]
quantum = 16
[routing.vllm-cache-aware]
hashing = "position"
touch = "sampled"
[[models]]
name = "*"
tokenizer = "tiktoken:cl100k_base"
[[backends]]
id = "a"
url = "http://a:1"
kv_events = "http://a:5557"
"#,
        expect![[r#"
            5:10: routing.policy is "dlpm" (expected "cost" or "least-request" or "lmetric" or "prefix-cache" or "vllm-cache-aware" or "epp" or "chwbl" or "session" or "power-of-two" or "round-robin" or "random" or "least-kv" or "vtc-basic" or "preble-e2")
            6:10: unknown key routing.dlpm (expected one of allow_override, chwbl, cost, epp, learn, lmetric, min_index_wait, policy, preble-e2, prefix-cache, session, tiers, vllm-cache-aware, vtc-basic)
            17:13: backends[0].kv_events is not a usable endpoint (expected tcp://HOST:PORT, ipc://PATH, bind:tcp://ADDRESS:PORT, each with an optional ?ranks=N, or auto)
        "#]],
    );
}

#[test]
fn names_of_other_routers_are_refused_with_ours() {
    let file = r#"
[node]
id = 1
[routing]
policy = "vtc-fair"
[routing.vllm_cache_aware]
block_size = 16
max_blocks_per_backend = 100000
eviction_interval_secs = 60
cache_threshold = 0.3
load_factor = 1.25
[[models]]
name = "m"
policy = "vllm_cache_aware"
"#;
    faults(
        file,
        expect![[r#"
            5:10: routing.policy is "vtc-fair" (expected admission.order = "vtc", which is fair with any policy; "vtc-basic" is the policy)
            6:10: unknown key routing.vllm_cache_aware (expected [routing.vllm-cache-aware])
            7:1: unknown key routing.vllm-cache-aware.block_size (expected nothing: engines tell it; [[models]] block_size overrides it)
            8:1: unknown key routing.vllm-cache-aware.max_blocks_per_backend (expected [[backends]] capacity_blocks, for engines that do not tell their capacity)
            9:1: unknown key routing.vllm-cache-aware.eviction_interval_secs (expected nothing: blocks are forgotten when there are more than the engine holds)
            10:1: unknown key routing.vllm-cache-aware.cache_threshold (expected cache_threshold_permille, 300 for 0.3)
            11:1: unknown key routing.vllm-cache-aware.load_factor (expected load_factor_milli, 1250 for 1.25)
            14:10: models[0].policy is "vllm_cache_aware" (expected "vllm-cache-aware")
        "#]],
    );
}

#[test]
fn admission_is_set_by_the_names_of_the_reference() {
    let config = config(
        r#"
[node]
id = 1
[admission]
order = "vtc-max-fair"
concurrency = 8
max_wait = "2s"
priority_max = 3
inter_token = "25ms"
"#,
    );
    assert_eq!(config.admission.priority_max, 3);
    let expected = AdmissionSettings {
        order: Order::VtcMaxFair,
        concurrency: Concurrency::Fixed(8),
        max_wait_ms: 2000,
        inter_token_us: 25_000,
        ..AdmissionSettings::default()
    };
    assert_eq!(config.admission.founding, expected);
}

#[test]
fn admission_settings_default_to_those_of_state() {
    let config = config("[node]\nid = 1\n");
    assert_eq!(config.admission.founding, AdmissionSettings::default());
}

#[test]
fn inconsistent_admission_settings_are_refused() {
    faults(
        r#"
[node]
id = 1
[admission]
concurrency = "some"
order = "first"
bins = 65
"#,
        expect![[r#"
            5:15: admission.concurrency is "some" (expected an integer from 1 to 65536, "adaptive" or "unlimited")
            6:9: admission.order is "first" (expected "vtc" or "vtc-max-fair" or "vtc-pred" or "dlpm" or "lcf" or "rpm" or "fcfs")
            7:8: admission.bins is 65 (expected an integer from 1 to 64)
        "#]],
    );
}

#[test]
fn contradicting_keys_are_refused() {
    faults(
        r#"
[node]
id = 1
[listen]
data = "0.0.0.0:8080"
admin = "127.0.0.1:8080"
peer = "0.0.0.0:8082"
[cluster]
peers = ["a:1", "b:1", "a:1"]
peers_dns = "quorate:8082"
join = ["c:1"]
bootstrap_expect = 5
heartbeat = "100ms"
[[models]]
name = "m"
[[models]]
name = "m"
[[backends]]
id = "a/b"
url = "http://a:1"
[[backends]]
url = "http://a:1"
[users]
api_keys_file = "/nonexistent/keys"
"#,
        expect![[r#"
            6:9: listen.admin is 127.0.0.1:8080, which listen.data has taken (expected a different port for each listener)
            7:8: listen.peer is 0.0.0.0:8082 and listen.advertise is not set (expected listen.advertise, the host under which other replicas reach this one)
            7:8: listen.peer is 0.0.0.0:8082, which others can reach, and neither tls.peer nor cluster.secret_file is set (expected [tls.peer], cluster.secret_file, an address on loopback, or insecure = true)
            9:9: cluster.peers names a:1 twice (expected each replica once)
            10:13: cluster.peers_dns is set beside cluster.peers (expected only one of cluster.peers, cluster.peers_dns and cluster.join)
            11:8: cluster.join is set beside the peers of a new cluster (expected only one of cluster.peers, cluster.peers_dns and cluster.join)
            12:20: cluster.bootstrap_expect is set beside cluster.join (expected no bootstrap_expect where a running cluster is joined)
            12:20: cluster.bootstrap_expect is 5, cluster.peers names 3 (expected at most as many as there are peers)
            13:13: cluster.election_timeout begins at 150ms with a cluster.heartbeat of 100ms (expected a least election timeout of two heartbeats or more)
            17:8: models[1].name is "m", as is models[0].name (expected each name once)
            19:6: backends[0].id is out of bounds (expected 1 to 256 characters of [A-Za-z0-9._-])
            21:1: backends[1].id is not set (expected non-empty text)
            22:7: backends[1].url is "http://a:1", as is backends[0].url (expected each url once)
            24:17: users.api_keys_file: read "/nonexistent/keys": No such file or directory (os error 2) (expected a file with one key a line)
        "#]],
    );
}

#[test]
fn settings_that_would_fail_later_are_refused_at_load() {
    let long = "x".repeat(300);
    let empty = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        r#"
"node.id" = 1
[node]
id = 1
[cluster]
peers = ["a:1", "b:1", "c:1", "d:1"]
bootstrap_expect = 2
heartbeat = "500000000000y"
[probes]
interval = "1ms"
health_path = "health"
api_key_file = {:?}
[[backends]]
id = "a"
url = "http://a:1"
models = ["m", "{long}"]
[[backends]]
id = "b"
url = "http://b:1"
labels = {{ zone = "{long}" }}
"#,
        empty.path()
    );
    let shown = brief(&layers(&text, &[], &[]).expect_err("the config must be refused"));
    let shown = shown.replace(&empty.path().display().to_string(), "KEY");
    expect![[r#"
        2:1: unknown key node.id (expected one of admin, admission, backends, circuit, cluster, cors, decisions, discovery, drain, insecure, limits, listen, log, models, node, picker, prices, probes, requests, retry, routing, sessions, splits, streams, timeouts, tls, tracing, usage, users)
        7:20: cluster.bootstrap_expect is 2, cluster.peers names 4 (expected more than half of the peers, or two clusters could form)
        8:13: cluster.heartbeat is "500000000000y" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
        10:12: probes.interval is 1ms (expected 50ms or more)
        11:15: probes.health_path is "health" (expected a path, such as "/health")
        12:16: probes.api_key_file: "KEY" holds no key, or more than one (expected a file with one key and no more)
        16:10: backends[0].models[1] is out of bounds (expected 1 to 256 bytes)
        20:10: backends[1].labels.zone is out of bounds (expected at most 256 bytes)
    "#]]
    .assert_eq(&shown);
}

#[test]
fn flags_override_variables_file_and_defaults() {
    let file = "[node]\nid = 1\n[cluster]\nflush_interval = \"30ms\"\nheartbeat = \"40ms\"\n";
    let variables = variables(&[
        ("QUORATE_CLUSTER__HEARTBEAT", "60ms"),
        ("QUORATE_NODE__ID", "7"),
    ]);
    let flags = ["node.id=9".to_owned()];
    let loaded = layers(file, &variables, &flags).unwrap();
    assert_eq!(loaded.config.id, ReplicaId(9));
    assert_eq!(loaded.config.cluster.heartbeat, Duration::from_millis(60));
    assert_eq!(
        loaded.config.cluster.flush_interval,
        Duration::from_millis(30)
    );
    assert_eq!(loaded.config.drain.deadline, Duration::from_secs(30));
}

#[test]
fn lists_in_variables_are_separated_by_commas() {
    let variables = variables(&[
        ("QUORATE_CLUSTER__PEERS", "a:1, b:1,c:1"),
        ("QUORATE_ADMIN", "http://127.0.0.1:1"),
        ("QUORATE_RETRY__STATUSES", ""),
    ]);
    let config = layers("node.id = 1", &variables, &[]).unwrap().config;
    let peers = vec!["a:1".to_owned(), "b:1".to_owned(), "c:1".to_owned()];
    assert_eq!(config.formation, Formation::Peers { peers, expect: 3 });
    assert_eq!(config.retry.statuses, Vec::<u16>::new());
}

#[test]
fn errors_in_variables_and_flags_name_them() {
    let variables = variables(&[
        ("QUORATE_NODE__ID", "0"),
        ("QUORATE_NODE__IDD", "1"),
        ("QUORATE_NODE_ID", "1"),
        ("QUORATE_SERVICE_HOST", "10.0.0.1"),
        ("QUORATE_BACKENDS__0__URL", "http://a:1"),
    ]);
    let flags = [
        "drain.deadline=soon".to_owned(),
        "drain".to_owned(),
        "drain.dedline=1s".into(),
    ];
    let faults = layers("", &variables, &flags).expect_err("must be refused");
    expect![[r#"
        QUORATE_NODE__ID: node.id is "0" (expected an integer from 1 to 255, or "from-hostname")
        QUORATE_NODE__IDD: names no key (expected QUORATE_NODE__ID)
        QUORATE_NODE_ID: names no key (expected QUORATE_NODE__ID)
        QUORATE_BACKENDS__0__URL: names no key (expected [[backends]] in the config file, or serve --backend URL)
        --set drain.deadline=soon: drain.deadline is "soon" (expected a duration up to 1day, such as "5s")
        --set drain: has no value (expected section.key=value)
        --set drain.dedline=1s: names no key (expected drain.deadline)
    "#]]
    .assert_eq(&brief(&faults));
}

/// Prints a config with `print`. The result must load as an equal config.
fn printed_and_read_back(loaded: &Loaded, print: fn(&Loaded) -> String) -> String {
    let printed = print(loaded);
    let mut again = config(&printed);
    // A printed config sets every key, so this part differs.
    again.file.clone_from(&loaded.config.file);
    assert_eq!(again, loaded.config, "{printed}");
    printed
}

#[test]
fn printed_config_shows_sources_and_parses_back() {
    let file = r#"
node.id = 1
[cluster]
peers = ["a:1", "b:1", "c:1"]
[[backends]]
id = "gpu-1"
url = "http://10.0.1.1:8000"
labels = { zone = "a b", "x.y" = "z" }
"#;
    let variables = variables(&[("QUORATE_LOG__FORMAT", "json")]);
    let loaded = layers(file, &variables, &["drain.dns_ttl=0s".to_owned()]).unwrap();
    let printed = printed_and_read_back(&loaded, print);
    expect_file!["../golden/print.toml"].assert_eq(&printed);
}

#[test]
fn basic_keys_are_printed_with_descriptions_and_read_back() {
    let file = r#"
node.id = 1
[listen]
admin = "127.0.0.1:9"
[[backends]]
id = "gpu-1"
url = "http://10.0.1.1:8000"
"#;
    let loaded = layers(file, &[], &[]).unwrap();
    let printed = printed_and_read_back(&loaded, print_basic);
    expect_file!["../golden/basic.toml"].assert_eq(&printed);
}

#[test]
fn the_schema_names_every_key() {
    let schema = schema();
    let section = &schema["properties"]["cluster"];
    assert_eq!(section["additionalProperties"], false);
    assert_eq!(section["properties"]["flush_interval"]["default"], "20ms");
    assert_eq!(
        schema["properties"]["backends"]["items"]["required"][0],
        "id"
    );
    let nested = &schema["properties"]["routing"]["properties"]["cost"]["properties"];
    assert_eq!(nested["prefill_ns_per_token"]["default"], 100_000);
    assert!(section["properties"]["heartbeat"].get("format").is_none());
    assert!(
        schema["properties"]["log"]["properties"]
            .get("format")
            .is_some()
    );
}

#[test]
fn a_secret_file_must_be_long_and_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    let loaded = |content: &str, mode| {
        std::fs::write(&file, content).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let flags = vec![
            "node.id=1".to_owned(),
            format!("node.data_dir={}", dir.path().display()),
            format!("cluster.secret_file={}", file.display()),
        ];
        super::load(&Origin {
            flags,
            ..Origin::default()
        })
    };
    let long = "0123456789abcdef0123456789abcdef\n";
    let config = loaded(long, 0o640).unwrap().config;
    assert_eq!(config.secret, raft::Secret::new(long.as_bytes()).ok());
    assert!(!config.cluster.authentication_optional);
    for (content, mode, why) in [
        ("short", 0o600, "5 bytes, at least 32 expected"),
        (long, 0o644, "everybody may use it (mode 644)"),
    ] {
        let Err(faults) = loaded(content, mode) else {
            panic!("{why}");
        };
        let told = format!("{faults:?}");
        assert!(told.contains(why), "{told}");
    }
}
