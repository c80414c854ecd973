//! Tests of values that other routers take, in forms that are not ours.

use super::*;

fn picker(limit: &str) -> String {
    let text = format!("kind: EndpointPickerConfig\nflowControl: {{maxBytes: {limit}}}\n");
    imported(ImportKind::Epp, "a.yaml", &text).config
}

#[test]
fn quantities_of_kubernetes_are_read() {
    for (quantity, ours) in [
        ("5k", 5_000_i64),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1500m", 2),
        ("100m", 1),
        ("1.5Ki", 1536),
        ("1Ei", 1 << 60),
        ("2P", 2_000_000_000_000_000),
    ] {
        let config = picker(quantity);
        let line = format!("max_held_bodies = {ours} ");
        assert!(config.contains(&line), "{quantity}: {line} in {config}");
    }
    for wrong in ["1ki", "x", "-1", "1Q", "99Ei"] {
        let text = format!("kind: EndpointPickerConfig\nflowControl: {{maxBytes: {wrong}}}\n");
        let files = [("a.yaml".to_owned(), text)];
        assert!(import_texts(ImportKind::Epp, &files).is_err(), "{wrong}");
    }
}

#[test]
fn a_fraction_is_rounded_with_a_note() {
    let config = imported(ImportKind::Smg, "a.sh", "smg --queue-size 7.6").config;
    let line = "max_queue = 8 ";
    assert!(
        config.contains(line) && config.contains("--queue-size, rounded\n"),
        "{config}"
    );
}

#[test]
fn an_empty_value_sets_nothing() {
    let text = "\u{feff}AIBRIX_PREFIX_CACHE_BLOCK_SIZE=\nROUTING_ALGORITHM=''\n";
    let made = imported(ImportKind::Aibrix, "a.env", text);
    assert_eq!((made.carried, made.left), (0, 2), "{}", made.config);
    let told = "ROUTING_ALGORITHM : empty, nothing to set";
    assert!(made.config.contains(told), "{}", made.config);
}

#[test]
fn the_last_line_of_an_env_file_counts() {
    let text = "ROUTING_ALGORITHM=random\nROUTING_ALGORITHM=least-request\n";
    let config = imported(ImportKind::Aibrix, "a.env", text).config;
    assert!(config.contains("policy = \"least-request\""), "{config}");
    let told = "a.env:1: ROUTING_ALGORITHM, which line 2 sets again";
    assert!(config.contains(told), "{config}");
}

#[test]
fn a_prefixed_flag_takes_the_values_of_the_bare_one() {
    let text = "smg --router-policy random --router-queue-size 7 --router-selector a=b";
    let made = imported(ImportKind::Smg, "a.sh", text);
    assert_eq!((made.carried, made.left), (2, 1), "{}", made.config);
}
