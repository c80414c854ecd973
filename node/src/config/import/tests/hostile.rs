//! Tests of files that would break out of the config made from them, and of values that are refused.

use super::*;

#[test]
fn seeds_of_the_fuzz_target_keep_its_property() {
    fuzzing::import_seeds()
        .iter()
        .for_each(|seed| fuzzing::import(seed));
}

#[test]
fn a_value_with_line_breaks_adds_no_keys() {
    let value = "x\n[admin]\ninsecure = true\n#\u{7f}\u{85}\r";
    for flag in [
        "--host",
        "--worker-urls",
        "--health-check-endpoint",
        "--cors-allowed-origins",
        "--selector",
        "--policy",
    ] {
        let value = serde_json::to_string(value).unwrap();
        let text = format!("- {flag}\n- {value}\n");
        let config = imported(ImportKind::Smg, "args.yaml", &text).config;
        assert!(!config.contains("\n[admin]"), "{config}");
        let is_shown = |c: char| c == '\n' || !c.is_control();
        assert!(config.chars().all(is_shown), "{config:?}");
    }
}

#[test]
fn a_files_name_with_line_breaks_adds_no_keys() {
    let name = "a\n[admin]\ninsecure = true\u{1b}[2J";
    let config = imported(ImportKind::Smg, name, "smg --port 1 --frobnicate").config;
    assert!(!config.contains("\n[admin]"), "{config}");
}

#[test]
fn a_refused_value_is_told_of_and_not_carried_over() {
    let text = "vllm-router --worker-urls grpc://a:50051 --retry-max-retries 99 --queue-size 3";
    let imported = imported(ImportKind::VllmRouter, "run.sh", text);
    let config = &imported.config;
    assert_eq!((imported.carried, imported.left), (1, 2), "{config}");
    let [retries, url] = &*imported.refused else {
        panic!("{:?}", imported.refused);
    };
    let place = |told: &str, name| told.starts_with(&format!("run.sh:1 {name}: "));
    assert!(place(retries, "--retry-max-retries") || place(url, "--retry-max-retries"));
    assert!(place(retries, "--worker-urls") || place(url, "--worker-urls"));
    fuzzing::has_engines_or_tells(&imported);
}

#[test]
fn a_file_that_this_machine_lacks_stays_in_the_config() {
    let text = "smg --worker-urls http://a:1 --tls-cert-path /nowhere/a.pem --tls-key-path \
                /nowhere/b.pem --tokenizer-path /nowhere/m";
    let told = imported(ImportKind::Smg, "run.sh", text);
    let config = &told.config;
    for line in [
        "\ncert_file = \"/nowhere/a.pem\" ",
        "\nkey_file = \"/nowhere/b.pem\" ",
        "\ntokenizer = \"huggingface:/nowhere/m/tokenizer.json\" ",
    ] {
        assert!(config.contains(line), "{line} in {config}");
    }
    assert_eq!((told.refused.len(), told.carried), (0, 4), "{config}");
    for file in ["/nowhere/a.pem", "/nowhere/m/tokenizer.json"] {
        let mut incomplete = told.incomplete.iter();
        assert!(incomplete.any(|it| it.contains(file)), "{file} in {config}");
    }
    let half = imported(
        ImportKind::Smg,
        "run.sh",
        "smg --tls-cert-path /nowhere/a.pem",
    );
    assert_eq!(half.refused.len(), 1, "{}", half.config);
}
