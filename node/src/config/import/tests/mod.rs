//! Tests of imports from other routers.

mod guide;
mod hostile;
mod readers;
mod rows;
mod values;

use clap::ValueEnum;
use expect_test::{Expect, expect};

use super::super::read;
use super::super::read::Layers;
use super::*;

fn imported(kind: ImportKind, name: &str, text: &str) -> Imported {
    let files = [(name.to_owned(), text.to_owned())];
    let imported = import_texts(kind, &files).unwrap_or_else(|errors| panic!("{errors}"));
    fuzzing::has_keys(&imported);
    let layers = Layers {
        file: &imported.config,
        ..Layers::default()
    };
    if let Err(errors) = read("import.toml", &layers) {
        let config = &imported.config;
        assert!(!imported.incomplete.is_empty(), "{errors}\n{config}");
    }
    imported
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "reads like the macro that makes it"
)]
fn becomes(kind: ImportKind, name: &str, text: &str, expected: Expect) {
    let config = imported(kind, name, text).config;
    let lines = config.lines().filter(|line| !line.starts_with("# Table: "));
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    expected.assert_eq(&lines);
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "reads like the macro that makes it"
)]
fn refused(kind: ImportKind, name: &str, text: &str, expected: Expect) {
    let files = [(name.to_owned(), text.to_owned())];
    let errors = import_texts(kind, &files).expect_err("the file must be refused");
    expected.assert_eq(&errors.render(false, Some(100)));
}

#[test]
fn a_command_line_becomes_a_config() {
    let script = "#!/bin/sh
export TOKEN=secret
vllm serve m --port 8000 &
smg launch --policy power_of_two --port 9000 \\
  --worker-urls http://gpu-1:8000 'http://gpu-2:8000' \\
  --prefill http://gpu-3:8000 9001 --queue-timeout-secs 2.5 --retry-max-retries 99 \\
  --api-key=secret --log-level=$LEVEL --jwt-issuer i --pd-disaggregation --frobnicate secret > log 2>&1
";
    becomes(
        ImportKind::Smg,
        "run.sh",
        script,
        expect![[r##"
            # From run.sh.

            # For production:
            # - cluster.peers, listen.advertise and cluster.secret_file make several replicas a cluster; this is one of its own

            [node]
            id = 1                                                   # each replica has its own

            [listen]
            data = "0.0.0.0:9000"                                    # run.sh:4 --port

            [routing]
            policy = "power-of-two"                                  # run.sh:4 --policy power_of_two

            [admission]
            max_wait = "2500ms"                                      # run.sh:6 --queue-timeout-secs

            # [retry]
            # attempts = 99 # run.sh:6 --retry-max-retries: retry.attempts is 99; expected an integer from 1 to 16

            [[backends]]
            id = "gpu-1-8000"                                        # the URL
            url = "http://gpu-1:8000"                                # run.sh:5 --worker-urls

            [[backends]]
            id = "gpu-2-8000"                                        # the URL
            url = "http://gpu-2:8000"                                # run.sh:5 --worker-urls

            [[backends]]
            id = "gpu-3-8000"                                        # the URL
            url = "http://gpu-3:8000"                                # run.sh:6 --prefill
            role = "prefill"                                         # run.sh:6 --prefill

            # Not known:
            # - run.sh:7 --frobnicate: not known

            # To be set by hand:
            # - run.sh:7 --api-key: `[[backends]] api_key_file`, by hand: per engine, in a file; `quorate key create` makes keys of clients
            # - run.sh:7 --log-level $LEVEL: filled in elsewhere

            # Without a counterpart:
            # - run.sh:7 --jwt-issuer: no counterpart: use an identity proxy in front

            # Nothing to set:
            # - run.sh:7 --pd-disaggregation: nothing to set: `role` is enough, and the engine's protocol is recognised

            # Not read:
            # - run.sh:3: `vllm`, another command
        "##]],
    );
}

#[test]
fn an_endpoint_pickers_config_becomes_a_config() {
    let config_map = "kind: ConfigMap
data:
  picker.yaml: |
    apiVersion: llm-d.ai/v1alpha1
    kind: EndpointPickerConfig
    featureGates:
    - flowControl
    plugins:
    - type: prefix-cache-scorer
      name: prefixes
      parameters:
        hashBlockSize: 64
    - type: queue-scorer
    - type: load-aware-scorer
    - type: max-score-picker
      parameters:
        maxNumOfEndpoints: 3
    schedulingProfiles:
    - name: default
      plugins:
      - pluginRef: prefixes
        weight: 1.5
      - pluginRef: queue-scorer
      - pluginRef: load-aware-scorer
        weight: 1
    flowControl:
      defaultRequestTTL: 30s
      maxBytes: 1Gi
      frobnicate: 1
";
    becomes(
        ImportKind::Epp,
        "map.yaml",
        config_map,
        expect![[r##"
            # From map.yaml.

            # To complete:
            # - [[backends]] with `id` and `url`, or [[discovery]]: no engine is named

            # For production:
            # - cluster.peers, listen.advertise and cluster.secret_file make several replicas a cluster; this is one of its own

            [node]
            id = 1                                                   # each replica has its own

            [listen]
            picker = "0.0.0.0:9002"                                  # the endpoint picker's usual port

            [routing]
            policy = "epp"                                           # the weighted scorers

            [routing.epp]
            prefix_weight = 15                                       # map.yaml:21 prefix-cache-scorer.weight
            queue_weight = 10                                        # map.yaml:23 queue-scorer.weight
            kv_weight = 0                                            # no profile has the scorer, or none is listed

            [picker]
            endpoints = 3                                            # map.yaml:17 max-score-picker.maxNumOfEndpoints

            [admission]
            max_wait = "30s"                                         # map.yaml:27 flowControl.defaultRequestTTL

            [limits]
            max_held_bodies = 1073741824                             # map.yaml:28 flowControl.maxBytes

            # Not known:
            # - map.yaml:29 flowControl.frobnicate: not known

            # Without a counterpart:
            # - map.yaml:24 load-aware-scorer.weight: no counterpart: `epp` weighs queues and caches only; the policy `cost` weighs running requests and tokens, at prices learned per engine
            # - map.yaml:14 load-aware-scorer: no counterpart: `epp` weighs queues and caches only; the policy `cost` weighs running requests and tokens, at prices learned per engine

            # Nothing to set:
            # - map.yaml:9 prefix-cache-scorer: nothing to set: the weight counts
            # - map.yaml:12 prefix-cache-scorer.hashBlockSize: nothing to set: engines report block size and capacity; `[[models]] block_size` and `[[backends]] capacity_blocks` override them, and prompts match over their whole length
            # - map.yaml:13 queue-scorer: nothing to set: the weight counts
            # - map.yaml:15 max-score-picker: nothing to set: the best score wins
            # - map.yaml:7 featureGates.flowControl: nothing to set: requests always queue when engines are full
        "##]],
    );
}

#[test]
fn a_deployment_becomes_a_config() {
    let deployment = "kind: Deployment
spec:
  containers:
  - image: aibrix/gateway-plugins:v0.7.0
    args: [--grpc-bind-address=:50052]
    env:
    - name: ROUTING_ALGORITHM
      value: prefix-cache
    - name: AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR
      value: \"1\"
    - name: AIBRIX_PREFIX_CACHE_BLOCK_SIZE
      valueFrom: {configMapKeyRef: {name: c, key: k}}
    - name: AIBRIX_STATESYNC_ENABLED
      value: \"true\"
    - name: AIBRIX_FROBNICATE
      value: secret
---
kind: ConfigMap
data:
  AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE: remote
";
    becomes(
        ImportKind::Aibrix,
        "gateway.yaml",
        deployment,
        expect![[r##"
            # From gateway.yaml.

            # To complete:
            # - [[backends]] with `id` and `url`, or [[discovery]]: no engine is named

            # For production:
            # - cluster.peers, listen.advertise and cluster.secret_file make several replicas a cluster; this is one of its own

            [node]
            id = 1                                                   # each replica has its own

            [routing]
            policy = "prefix-cache"                                  # gateway.yaml:7 ROUTING_ALGORITHM prefix-cache

            [routing.prefix-cache]
            standard_deviation_factor_milli = 1000                   # gateway.yaml:9 AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR

            [users]
            identify_by = ["api_key", "header:user"]                 # AIBrix takes the user from the header `user`

            [[models]]
            name = "*"                                               # all models
            tokenizer = "engine"                                     # gateway.yaml:20 AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE remote

            # Not known:
            # - gateway.yaml:15 AIBRIX_FROBNICATE: not known

            # To be set by hand:
            # - gateway.yaml:5 --grpc-bind-address: `listen.picker`, by hand: only for a gateway that asks for endpoints; else `listen.data`
            # - gateway.yaml:11 AIBRIX_PREFIX_CACHE_BLOCK_SIZE: filled in elsewhere: `[[models]] block_size`: bytes with `character`, else tokens

            # Nothing to set:
            # - gateway.yaml:13 AIBRIX_STATESYNC_ENABLED: nothing to set: replicas share a log, see `cluster.peers`
        "##]],
    );
}

#[test]
fn selectors_of_each_role_become_sources() {
    let text = "vllm-router --service-discovery --service-discovery-port 8000 \
                --prefill-selector app=vllm role=prefill --decode-selector role=decode";
    becomes(
        ImportKind::VllmRouter,
        "router.txt",
        text,
        expect![[r##"
            # From router.txt.

            # For production:
            # - cluster.peers, listen.advertise and cluster.secret_file make several replicas a cluster; this is one of its own

            [node]
            id = 1                                                   # each replica has its own

            [listen]
            data = "127.0.0.1:30000"                                 # the vLLM router's default

            [[discovery]]
            id = "prefill"                                           # the role
            kind = "kubernetes"                                      # router.txt:1 --service-discovery
            selector = "app=vllm,role=prefill"                       # router.txt:1 --prefill-selector
            port = 8000                                              # router.txt:1 --service-discovery-port
            role = "prefill"                                         # the selector's name

            [[discovery]]
            id = "decode"                                            # the role
            kind = "kubernetes"                                      # router.txt:1 --service-discovery
            selector = "role=decode"                                 # router.txt:1 --decode-selector
            port = 8000                                              # router.txt:1 --service-discovery-port
            role = "decode"                                          # the selector's name
        "##]],
    );
}

#[test]
fn several_files_become_one_config_and_the_first_value_counts() {
    let files = [
        ("a.env".to_owned(), "ROUTING_ALGORITHM=random".to_owned()),
        (
            "b.env".to_owned(),
            "ROUTING_ALGORITHM=least-request".to_owned(),
        ),
    ];
    let imported = import_texts(ImportKind::Aibrix, &files).unwrap();
    assert!(
        imported.config.contains("policy = \"random\""),
        "{}",
        imported.config
    );
    let told = "b.env:1 ROUTING_ALGORITHM least-request: `routing.policy` is set already, from \
                a.env:1 ROUTING_ALGORITHM random";
    assert!(imported.config.contains(told), "{}", imported.config);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let errors = import(ImportKind::Epp, &[PathBuf::from("/nowhere/a.yaml")]).unwrap_err();
    assert!(
        errors.to_string().contains("read /nowhere/a.yaml"),
        "{errors}"
    );
}

#[test]
fn a_switch_counts_before_and_after_what_it_turns_off() {
    for flags in [
        "--disable-retries --retry-max-retries 7",
        "--retry-max-retries 7 --disable-retries",
    ] {
        let config = imported(ImportKind::Smg, "run.sh", &format!("smg {flags}")).config;
        assert!(config.contains("\nattempts = 1 "), "{config}");
        assert!(
            config.contains("# - run.sh:1 --retry-max-retries: "),
            "{config}"
        );
    }
}

#[test]
fn limits_that_mean_something_else_are_set_by_hand() {
    for (kind, name, text, key) in [
        (
            ImportKind::Aibrix,
            "a.env",
            "AIBRIX_PREFILL_REQUEST_TIMEOUT=60",
            "first_byte",
        ),
        (
            ImportKind::Smg,
            "a.sh",
            "smg --health-check-interval-secs 60",
            "interval",
        ),
        (
            ImportKind::VllmRouter,
            "a.sh",
            "vllm-router --max-concurrent-requests 9",
            "max_requests",
        ),
        (ImportKind::Smg, "a.sh", "smg --queue-size 0", "max_queue"),
    ] {
        let config = imported(kind, name, text).config;
        assert!(config.contains("# To be set by hand:\n# - a."), "{config}");
        assert!(!config.contains(&format!("\n{key} = ")), "{config}");
    }
    let config = imported(ImportKind::Smg, "a.sh", "smg --max-concurrent-requests 9").config;
    assert!(config.contains("\nmax_requests = 9 "), "{config}");
}

#[test]
fn zero_keeps_its_meaning() {
    let text = "kind: EndpointPickerConfig\nflowControl: {maxRequests: 0, maxBytes: 0, \
                defaultRequestTTL: 0s}\n";
    let made = imported(ImportKind::Epp, "a.yaml", text);
    assert_eq!((made.carried, made.left), (0, 3), "{}", made.config);
    assert!(made.refused.is_empty(), "{:?}", made.refused);
    let config = imported(ImportKind::Smg, "a.sh", "smg --retry-max-retries 0").config;
    assert!(config.contains("\nattempts = 1 "), "{config}");
    let config = imported(ImportKind::Smg, "a.sh", "smg --retry-max-retries 3").config;
    assert!(config.contains("\nattempts = 3 "), "{config}");
}
