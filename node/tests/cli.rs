//! The program as seen by a user: stdout, stderr and exit codes.

#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

#[path = "cli/access.rs"]
mod access;
#[path = "cli/access_log.rs"]
mod access_log;
#[path = "cli/crowd.rs"]
mod crowd;
#[path = "cli/demo.rs"]
mod demo;
#[path = "cli/forming.rs"]
mod forming;
#[path = "cli/guide.rs"]
mod guide;
#[path = "cli/operating.rs"]
mod operating;
#[path = "shared/otlp.rs"]
mod otlp;
#[path = "cli/peers_dns.rs"]
mod peers_dns;
#[path = "cli/process.rs"]
mod process;
#[path = "cli/production.rs"]
mod production;
#[path = "cli/service_manager.rs"]
mod service_manager;
#[path = "cli/signals.rs"]
mod signals;
#[path = "cli/starting.rs"]
mod starting;
#[path = "cli/terminal.rs"]
mod terminal;
#[path = "cli/top.rs"]
mod top;
#[path = "cli/tracing.rs"]
mod tracing;
#[path = "cli/users.rs"]
mod users;
#[path = "cli/version.rs"]
mod version;

use std::process::Output;

fn quorate(args: &[&str]) -> Output {
    let mut command = process::program(env!("CARGO_BIN_EXE_quorate"), args);
    command.output().expect("run quorate")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

#[test]
fn the_example_configs_are_valid() {
    let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy");
    for file in [
        "local/n1.toml",
        "local/n2.toml",
        "local/n3.toml",
        "systemd/quorate.toml",
    ] {
        let file = format!("{deploy}/{file}");
        let output = quorate(&["config", "check", "--config", &file]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn an_invalid_config_exits_2_with_all_errors_on_stderr() {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("faulty.toml");
    std::fs::write(&file, "[node]\nid = 0\nname = \"x\"\n").unwrap();
    for command in [
        &["config", "check"][..],
        &["config", "print"],
        &["serve"],
        &["recover"],
    ] {
        let output = quorate(&[command, &["--config", file.to_str().unwrap()]].concat());
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {told}");
        assert!(output.stdout.is_empty(), "{command:?}");
        assert!(
            told.contains("node.id is 0") && told.contains("unknown key node.name"),
            "{told}"
        );
        assert!(
            told.contains("2 faults") && !told.contains('\u{1b}'),
            "{told}"
        );
    }
}

#[test]
fn command_line_backends_are_validated_like_configured_ones() {
    let output = quorate(&["serve", "--backend", "ftp://127.0.0.1:1"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    let words: Vec<_> = told.split_whitespace().collect();
    let told = words.join(" ");
    assert!(told.contains("expected a URL, such as"), "{told}");
}

#[test]
fn engine_keys_are_never_printed() {
    let dir = tempfile::TempDir::new().unwrap();
    let (key, file) = (dir.path().join("key"), dir.path().join("n.toml"));
    std::fs::write(&key, "sk-of-engine\n").unwrap();
    let config = format!(
        "node.id = 1\n[[backends]]\nid = \"a\"\nurl = \"http://a:1\"\napi_key_file = {key:?}\n"
    );
    std::fs::write(&file, config).unwrap();
    for command in ["check", "print"] {
        let output = quorate(&["config", command, "--config", file.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let told = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(!told.contains("sk-of-engine"), "{told}");
    }
}

#[test]
fn a_misspelt_log_level_is_a_config_error() {
    let settings = ["--set", "node.id=1", "--set", "log.level=inof"];
    let output = quorate(&[&["config", "check"], &settings[..]].concat());
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("log.level") && told.contains("info,raft=debug"),
        "{told}"
    );
}

#[test]
fn bad_usage_exits_2() {
    for args in [
        &[][..],
        &["serve", "--nonsense"],
        &["no-such-command"],
        &["explain"],
        &["status", "--admin", "ftp://127.0.0.1:1"],
        &["member", "promote", "0"],
    ] {
        assert_eq!(quorate(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_command_without_a_reachable_replica_exits_1() {
    // Port 1 is reserved, so that nothing listens there.
    let output = quorate(&["status", "--admin", "http://127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(told.starts_with("error: GET http://127.0.0.1:1/admin/v1/cluster: cannot connect"));
    assert!(told.contains("QUORATE_ADMIN"), "{told}");
}

#[test]
fn machine_readable_output_is_well_formed() {
    let schema = quorate(&["config", "schema"]);
    let schema: serde_json::Value = serde_json::from_slice(&schema.stdout).expect("schema is JSON");
    assert_eq!(schema["type"], "object");
    let completions = quorate(&["completions", "bash"]);
    assert!(text(&completions.stdout).contains("transfer-leader"));
    let man = quorate(&["man"]);
    assert!(text(&man.stdout).contains(".TH quorate"));
}

#[test]
fn recover_on_an_empty_folder_changes_nothing() {
    let dir = tempfile::TempDir::new().unwrap();
    let data_dir = format!("node.data_dir={}", dir.path().join("data").display());
    let output = quorate(&["recover", "--set", "node.id=1", "--set", &data_dir]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("nothing to do"),
        "{}",
        text(&output.stdout)
    );
}
