//! `quorate replay` and `quorate engine` as programs: output and exit codes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// An engine process that is killed when dropped.
struct Engine {
    process: Child,
    url: String,
}

impl Engine {
    fn start() -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_quorate"))
            .args(["engine", "--listen", "127.0.0.1:0", "--speed", "10000"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the engine");
        let mut first_line = String::new();
        BufReader::new(process.stdout.take().expect("its output is piped"))
            .read_line(&mut first_line)
            .expect("read where it listens");
        let url = first_line
            .trim()
            .strip_prefix("engine listens on ")
            .expect(&first_line);
        let url = url.to_owned();
        Self { process, url }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.process.kill().expect("kill the engine");
        self.process.wait().expect("wait for the engine");
    }
}

fn replay(trace: &Path, target: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quorate"))
        .arg("replay")
        .arg("--trace")
        .arg(trace)
        .args(["--target", target, "--speed", "1000"])
        .args(more)
        .output()
        .expect("run the replay")
}

#[test]
fn replay_reports_cached_tokens_and_fails_on_failed_requests() {
    let engine = Engine::start();
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    let line = |at, id| {
        format!(
            "{{\"timestamp\":{at},\"input_length\":1100,\"output_length\":32,\
             \"hash_ids\":[0,1,{id}]}}\n"
        )
    };
    std::fs::write(&trace, line(0, 2) + &line(9000, 3) + &line(700_000, 4)).unwrap();

    let options = [
        "--scale",
        "1/16",
        "--first",
        "10m",
        "--max-in-flight",
        "1",
        "--json",
    ];
    let output = replay(&trace, &engine.url, &options);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["total"]["ok"], 2);
    // 1,100 tokens are 69 at this scale; the second request finds the two blocks of 32 it shares.
    assert_eq!(report["total"]["prompt_tokens"], 2 * 69);
    assert_eq!(report["total"]["cached_tokens"], 64);
    assert_eq!(report["total"]["completion_tokens"], 2 * 2);

    let output = replay(
        &trace,
        &engine.url,
        &["--scale", "1/16", "--model", "other"],
    );
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(
        told.contains("3 x status 404") && told.contains("does not exist"),
        "{told}"
    );
}

#[test]
fn a_bad_trace_is_reported_by_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    std::fs::write(&trace, "{\"timestamp\":0}\n").unwrap();
    let output = replay(&trace, "http://127.0.0.1:1", &[]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("trace.jsonl:1: expected {\"timestamp\": ms"),
        "{told}"
    );
}

#[test]
fn bad_flags_exit_2() {
    let trace = Path::new("no-such-file");
    for more in [
        &["--scale", "1/3"][..],
        &["--speed", "0"],
        &["--first", "soon"],
    ] {
        assert_eq!(
            replay(trace, "http://127.0.0.1:1", more).status.code(),
            Some(2),
            "{more:?}"
        );
    }
    for flag in [
        "--num-gpu-blocks=1",
        "--block-size=0",
        "--speed=-1",
        "--decode-ms=x",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_quorate"))
            .args(["engine", "--listen", "127.0.0.1:0", flag])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{flag}");
    }
}
