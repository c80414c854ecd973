//! Tests of files that would break out of the config made from them.

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
