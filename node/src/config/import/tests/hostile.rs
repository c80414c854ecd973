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
fn a_refused_value_does_not_count_as_carried_over() {
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

#[test]
fn secrets_are_not_in_the_result() {
    for (name, text) in [
        (
            "run.sh",
            "smg --worker-urls http://u:p-SECRET/@gpu:1?key=SECRET#SECRET SECRET@b:2 ",
        ),
        (
            "run.sh",
            "smg --otlp-traces-endpoint http://SECRET@c:4317?SECRET",
        ),
        ("run.sh", "smg --otlp-traces-endpoint u:SECRET@c:4317"),
        (
            "run.sh",
            "smg --cors-allowed-origins https://SECRET@a.example",
        ),
        (
            "run.sh",
            "smg --api-key SECRET --port 1 --frobnicate SECRET",
        ),
        ("run.sh", "smg --worker-urls grpc://SECRET@gpu:1?SECRET"),
    ] {
        let made = imported(ImportKind::Smg, name, text);
        let told = [
            made.incomplete,
            made.refused,
            made.unknown,
            vec![made.config],
        ];
        let told = told.concat().concat();
        assert!(!told.contains("SECRET"), "{told}");
    }
    for (kind, name, text) in [
        (ImportKind::Smg, "run.sh", "smg --api-key SECRET --port abc"),
        (ImportKind::Smg, "run.sh", "smg --port x SECRET"),
        (ImportKind::Smg, "run.sh", "smg --api-key 'SECRET"),
        (ImportKind::Aibrix, "a.env", "A=1\nSECRET"),
        (ImportKind::Aibrix, "a.env", "S-HIDDEN SECRET=1"),
        (ImportKind::Smg, "run.yaml", "args: [SECRET\n\nb: 'SECRET"),
    ] {
        let files = [(name.to_owned(), text.to_owned())];
        let errors = import_texts(kind, &files).expect_err("the file must be refused");
        assert!(!errors.to_string().contains("SECRET"), "{errors}");
    }
}
