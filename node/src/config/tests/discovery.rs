//! Tests of `[[discovery]]`, and of `[cluster.statefulset]`.

use std::time::Duration;

use api::engines::discovery::{PodChoice, SourceKind};
use expect_test::expect;

use super::*;

const SOURCES: &str = r#"
[node]
id = 1
[[discovery]]
kind = "dns"
name = "engines.prod.svc:8000"
interval = "5s"
resolver = "127.0.0.1:5353"
max_remove_fraction = 0.25
[[discovery]]
id = "services"
kind = "dns"
name = "_http._tcp.engines.internal"
remove_after = "1m"
[[discovery]]
kind = "file"
path = "/etc/quorate/engines.json"
models = ["m"]
labels = { rack = "a" }
role = "prefill"
max_remove_fraction = 1
[[discovery]]
kind = "kubernetes"
selector = "app=vllm"
port = 8000
scheme = "https"
"#;

#[test]
fn each_kind_of_source_parses() {
    let config = config(SOURCES);
    let sources = &config.discovery;
    let ids: Vec<_> = sources.iter().map(|it| &*it.rules.source).collect();
    assert_eq!(ids, ["dns", "services", "file", "kubernetes"]);
    let permille: Vec<_> = sources
        .iter()
        .map(|it| it.rules.lost_permille_max)
        .collect();
    assert_eq!(permille, [250, 500, 1000, 500]);
    assert_eq!(sources[1].rules.remove_after_ms, 60_000);
    let SourceKind::Dns(dns) = &sources[0].kind else {
        panic!("{:?}", sources[0]);
    };
    assert_eq!((&*dns.name, dns.port), ("engines.prod.svc", Some(8000)));
    assert_eq!(dns.interval, Duration::from_secs(5));
    assert_eq!(dns.resolver, Some("127.0.0.1:5353".parse().unwrap()));
    let SourceKind::Dns(services) = &sources[1].kind else {
        panic!("{:?}", sources[1]);
    };
    assert_eq!(services.port, None);
    let SourceKind::Kubernetes(pods) = &sources[3].kind else {
        panic!("{:?}", sources[3]);
    };
    assert_eq!(pods.pods, PodChoice::Selector("app=vllm".to_owned()));
}

#[test]
fn a_printed_config_with_sources_loads_equal() {
    printed_and_read_back(&layers(SOURCES, &[], &[]).unwrap(), print);
}

#[test]
fn missing_and_extra_source_keys_are_reported() {
    faults(
        r#"
[node]
id = 1
[[discovery]]
kind = "consul"
[[discovery]]
name = "a:1"
[[discovery]]
kind = "dns"
[[discovery]]
id = "no port"
kind = "dns"
name = "engines"
path = "/x"
[[discovery]]
id = "with-port"
kind = "dns"
name = "_http._tcp.engines:80"
[[discovery]]
kind = "file"
[[discovery]]
id = "file"
kind = "file"
path = "/x"
labels = { zone = "x" }
kv_events_port = 5557
port = 8000
[[discovery]]
kind = "kubernetes"
[[discovery]]
id = "pods"
kind = "kubernetes"
selector = "app=a"
inference_pool = "b"
max_remove_fraction = 0.0
[[discovery]]
id = "more-pods"
kind = "kubernetes"
selector = "app=a"
namespace = "../x"
kv_replay_port = 1
"#,
        expect![[r#"
            5:8: discovery[0].kind is "consul" (expected "dns" or "file" or "kubernetes")
            6:1: discovery[1].kind is not set (expected "dns" or "file" or "kubernetes")
            8:1: discovery[2].name is not set (expected name for this kind)
            11:6: discovery[3].id is "no port" (expected 1 to 64 characters of [A-Za-z0-9._-])
            13:8: discovery[3].name is "engines" (expected a name with a port, such as "engines.prod.svc:8000")
            14:8: discovery[3].path is set, and kind is "dns" (expected it where kind is file)
            18:8: discovery[4].name is "_http._tcp.engines:80" (expected a name of service records, such as "_http._tcp.engines.internal")
            19:1: discovery[5].path is not set (expected path for this kind)
            22:6: discovery[6].id is "file", as is discovery[5].id (expected each id once)
            26:18: discovery[6].kv_events_port is set, and kind is "file" (expected it where kind is dns or kubernetes)
            26:18: discovery[6].kv_events_port without a tokenizer (expected a [[models]] entry with another tokenizer than "character": KV events contain token ids)
            27:8: discovery[6].port is set, and kind is "file" (expected it where kind is kubernetes)
            28:1: discovery[7] has neither selector nor inference_pool (expected one of the two)
            35:23: discovery[8].max_remove_fraction is a number with a fraction (expected a number above 0 and up to 1, with at most three digits behind the point, such as 0.5)
            36:1: discovery[9].port is not set (expected the port of the engines, beside selector)
            40:13: discovery[9].namespace is not a valid object name (expected letters, digits, `-` and `.`)
            41:18: discovery[9].kv_replay_port is set (expected kv_events_port beside it)
        "#]],
    );
}

#[test]
fn a_replica_finds_its_statefulset_by_its_pod_name() {
    let set = "[node]\nid = 3\n[cluster.statefulset]\nname = \"quorate\"\n";
    faults(
        set,
        expect![[r#"
            4:8: cluster.statefulset.name is set, and node.id is 3 (expected node.id = "from-hostname" beside it)
        "#]],
    );
    let wrong = "[node]\nid = 3\n[cluster.statefulset]\nname = \"../pods\"\n";
    faults(
        wrong,
        expect![[r#"
            4:8: cluster.statefulset.name is not a valid object name (expected letters, digits, `-` and `.`)
        "#]],
    );
}
