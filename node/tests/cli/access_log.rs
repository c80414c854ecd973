//! The access log in a file: its lines, its rotation, and files that cannot be written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use super::process::{Replica, free, get, program, until};
use super::text;

/// Starts a replica that logs all requests to `access.log` in its folder, in this format.
fn logging(format: &str) -> Replica {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("access.log");
    logging_to(dir, &file, format)
}

fn logging_to(dir: tempfile::TempDir, file: &Path, format: &str) -> Replica {
    let [peer] = free();
    let config =
        format!("[log]\naccess = \"all\"\naccess_file = {file:?}\naccess_format = \"{format}\"\n");
    let replica = Replica::start_in(dir, 1, peer, &config, |command| command);
    replica.process.says(&["accepting requests"]);
    replica
}

/// Sends a request, and returns its id.
fn asked(replica: &Replica, model: &str) -> String {
    let answer = replica.chat(model, "");
    assert_eq!(answer.status, 404, "{}", answer.body);
    let mut lines = answer.head.lines();
    let id = lines.find_map(|line| line.strip_prefix("x-request-id: "));
    id.unwrap().to_owned()
}

fn lines(file: &str) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn until_told(file: &str, id: &str) -> String {
    let find = || lines(file).into_iter().find(|line| line.contains(id));
    // A line is written in one call, but its end may arrive later.
    until("a request is in the access log", || {
        std::fs::read_to_string(file).is_ok_and(|text| text.contains(id) && text.ends_with('\n'))
    });
    find().unwrap()
}

/// Reads a line of logfmt, values in quotes as JSON.
fn logfmt(line: &str) -> BTreeMap<String, String> {
    let mut pairs = BTreeMap::new();
    let mut rest = line;
    while let Some((key, value)) = rest.split_once('=') {
        let (value, behind) = if value.starts_with('"') {
            let mut values = serde_json::Deserializer::from_str(value).into_iter::<String>();
            let read = values.next().unwrap().unwrap();
            (read, &value[values.byte_offset()..])
        } else {
            let (plain, _) = value.split_once(' ').unwrap_or((value, ""));
            (plain.to_owned(), &value[plain.len()..])
        };
        assert_eq!(pairs.insert(key.to_owned(), value), None, "{line}");
        rest = behind.strip_prefix(' ').unwrap_or(behind);
    }
    assert_eq!(rest, "", "{line}");
    pairs
}

#[test]
fn access_log_lines_go_to_the_file_and_not_to_stderr() {
    for format in ["json", "logfmt"] {
        let replica = logging(format);
        let id = asked(&replica, r#"a \"b\" = c"#);
        let line = until_told(&replica.file("access.log"), &id);
        let field = |key: &str| match format {
            "json" => serde_json::from_str::<Value>(&line).unwrap()[key].clone(),
            _ => logfmt(&line)[key].clone().into(),
        };
        assert_eq!(field("request_id"), id);
        assert_eq!(field("level"), "INFO");
        assert_eq!(field("model"), r#"a "b" = c"#);
        assert_eq!(field("path"), "/v1/chat/completions");
        let status = field("status");
        assert!(status == 404 || status == "404", "{line}");
        humantime::parse_rfc3339(field("timestamp").as_str().unwrap()).unwrap();
        assert!(!replica.process.log().contains(&id));
        let mode = std::fs::metadata(replica.file("access.log")).unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn log_rotation_under_load_loses_no_line() {
    let mut replica = logging("json");
    let (file, old) = (replica.file("access.log"), replica.file("access.log.1"));
    let is_rotated = AtomicBool::new(false);
    let mut ids: BTreeSet<_> = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut ids = BTreeSet::new();
            while !is_rotated.load(Ordering::Relaxed) {
                ids.insert(asked(&replica, "m"));
            }
            ids
        });
        until("there are lines", || lines(&file).len() > 5);
        std::fs::rename(&file, &old).unwrap();
        replica.process.signal("HUP");
        until("there are lines in the new file", || lines(&file).len() > 5);
        is_rotated.store(true, Ordering::Relaxed);
        asking.join().unwrap()
    });
    ids.insert(asked(&replica, "m"));
    // Requests in flight at the signal are also logged.
    replica.process.signal("TERM");
    until("the process ends", || !replica.process.is_running());
    let told = [lines(&old), lines(&file)].concat();
    let told = told.iter().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["request_id"].as_str().unwrap().to_owned()
    });
    assert_eq!(told.collect::<BTreeSet<_>>(), ids);
}

#[test]
fn a_broken_config_does_not_prevent_log_rotation() {
    let replica = logging("json");
    let (file, config) = (replica.file("access.log"), replica.file("config.toml"));
    let sound = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, "[nonsense]\n").unwrap();
    std::fs::rename(&file, replica.file("moved")).unwrap();
    replica.process.signal("HUP");
    replica.process.says(&["could not reload", "nonsense"]);
    until_told(&file, &asked(&replica, "m"));
    std::fs::write(&config, sound).unwrap();
    assert_eq!(reload(&replica)["faults"], serde_json::json!([]));
}

fn reload(replica: &Replica) -> Value {
    let path = "/admin/v1/config/reload";
    let answer = super::process::send(replica.admin, "POST", path, "", None).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

#[test]
fn a_log_file_that_cannot_be_reopened_is_kept_and_reported() {
    let dir = tempfile::TempDir::new().unwrap();
    let folder = dir.path().join("logs");
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("access.log");
    let replica = logging_to(dir, &file, "json");
    let moved = replica.file("moved");
    std::fs::rename(&folder, &moved).unwrap();
    let faults = &reload(&replica)["faults"];
    let fault = faults[0].as_str().unwrap();
    assert!(
        fault.starts_with("log.access_file: open") && fault.contains("No such file"),
        "{faults}"
    );
    replica
        .process
        .says(&["ERROR", "still writing to the old file"]);
    until_told(&format!("{moved}/access.log"), &asked(&replica, "m"));
    let metrics = get(replica.admin, "/metrics").unwrap().body;
    assert!(metrics.contains("\nquorate_config_reload_failed 1\n"));
}

#[test]
fn a_full_disk_loses_only_log_lines() {
    let dir = tempfile::TempDir::new().unwrap();
    let replica = logging_to(dir, Path::new("/dev/full"), "json");
    asked(&replica, "m");
    replica.process.says(&[
        "ERROR",
        "could not write the access log",
        "/dev/full",
        "No space left",
    ]);
    asked(&replica, "m");
    let lost = "quorate_access_log_lines_dropped_total{reason=\"write-failed\"} 2\n";
    until("both are counted", || {
        get(replica.admin, "/metrics").unwrap().body.contains(lost)
    });
}

/// Serves with these lines of config until the process exits; returns exit code and output.
fn refused(dir: &Path, lines: &str) -> (Option<i32>, String) {
    let file = dir.join("config.toml");
    let data = dir.join("data");
    let text_of = format!("[node]\nid = 1\ndata_dir = {data:?}\n{lines}");
    std::fs::write(&file, text_of).unwrap();
    let args = ["serve", "--config", file.to_str().unwrap()];
    let mut command = program(env!("CARGO_BIN_EXE_quorate"), &args);
    let output = command.output().unwrap();
    let words: Vec<_> = text(&output.stderr).split_whitespace().collect();
    (output.status.code(), words.join(" "))
}

#[test]
fn an_unwritable_log_file_is_reported_with_its_path() {
    let dir = tempfile::TempDir::new().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "sk-1\n").unwrap();
    std::os::unix::fs::symlink(&keys, dir.path().join("link")).unwrap();
    let pipe = dir.path().join("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let a_file = "expected a writable file, or a pipe with a reader";
    for (name, why, expected) in [
        ("none/access.log", "No such file", a_file),
        (".", "Is a directory", a_file),
        ("pipe", "No such device", a_file),
        (
            "data/raft",
            "in node.data_dir",
            "expected a file outside node.data_dir",
        ),
        (
            "data/../data",
            "in node.data_dir",
            "expected a file outside node.data_dir",
        ),
        (
            "link",
            "another key names",
            "expected a file that is used for nothing else",
        ),
        (
            "engines.toml",
            "another key names",
            "expected a file that is used for nothing else",
        ),
        (
            "config.toml",
            "is this config",
            "expected a file that is used for nothing else",
        ),
    ] {
        let file = dir.path().join(name);
        let config = format!(
            "[users]\napi_keys_file = {keys:?}\n[log]\naccess_file = {file:?}\n\
             [[discovery]]\nkind = \"file\"\npath = {:?}\n",
            dir.path().join("engines.toml")
        );
        let (code, told) = refused(dir.path(), &config);
        assert_eq!(code, Some(2), "{name}: {told}");
        for part in ["log.access_file", why, expected, "config.toml:7:"] {
            assert!(told.contains(part), "{name}: {part} in {told}");
        }
    }
    assert_eq!(std::fs::read(&keys).unwrap(), b"sk-1\n");
    let (code, told) = refused(dir.path(), "[log]\naccess_format = \"logfmt\"\n");
    assert!(told.contains("log.access_file is not set"), "{told}");
    assert_eq!(code, Some(2), "{told}");
}
