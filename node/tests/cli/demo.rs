//! `quorate dev`, as a new user sees it.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Output, Stdio};

use serde_json::json;
use tempfile::TempDir;

use super::process::{Engine, free, get, program, send, until};

/// A dev cluster that runs until a signal, with its output.
struct Demo {
    child: Child,
    dir: TempDir,
}

impl Demo {
    fn start(args: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let temporary = dir.path().join("tmp");
        std::fs::create_dir(&temporary).unwrap();
        let file = |name| File::create(dir.path().join(name)).unwrap();
        let mut command = program(
            env!("CARGO_BIN_EXE_quorate"),
            &[&["dev", "--speed", "50"], args].concat(),
        );
        let command = command.env("TMPDIR", &temporary).stdin(Stdio::null());
        let command = command.stdout(file("out")).stderr(file("err"));
        let child = command.spawn().unwrap();
        Self { child, dir }
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap()
    }

    fn is_up(&self) {
        let is_up = || self.text("out").contains("The cluster is up.");
        until("the cluster is up", is_up);
    }

    /// Ends the cluster with a signal; returns how many of its temporary folders are left.
    fn end(mut self, signal: &str) -> usize {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.unwrap().success());
        let ended = || self.child.try_wait().unwrap().is_some();
        until("the cluster ends", ended);
        let left = std::fs::read_dir(self.dir.path().join("tmp")).unwrap();
        left.count()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // The process may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn dev_once(args: &[&str]) -> Output {
    let args = [&["dev", "--once", "--port", "0"], args].concat();
    program(env!("CARGO_BIN_EXE_quorate"), &args)
        .output()
        .unwrap()
}

/// Returns the number of requests that an engine has answered, and their prompt tokens.
fn answered(engine: &Engine) -> (f64, f64) {
    let address: SocketAddr = engine.url["http://".len()..].parse().unwrap();
    let metrics = get(address, "/metrics").unwrap().body;
    let sum = |name: &str| {
        let lines = metrics.lines().filter(|line| line.starts_with(name));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum()
    };
    (
        sum("vllm:request_success_total"),
        sum("vllm:prompt_tokens_total"),
    )
}

#[test]
fn dev_sends_given_engines_few_small_requests() {
    let engine = Engine::start();
    let output = dev_once(&["--backend", &engine.url, "--json"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output:?}");
    assert!(told.contains("Sending 20 small requests"), "{told}");
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["is_good"], true);
    assert_eq!(result["load"]["total"]["ok"], 20);
    let (requests, tokens) = answered(&engine);
    assert_eq!(requests, 20.0);
    assert!(tokens < 20.0 * 500.0, "{tokens} tokens");
}

#[test]
fn an_invalid_backend_is_reported_in_one_line() {
    let output = dev_once(&["--backend", "foo"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("foo") && told.contains("http://host"),
        "{told}"
    );
    assert_eq!(told.matches("ERROR").count(), 0, "{told}");
}

#[test]
fn dev_hints_produce_a_prefix_hit_and_leave_no_files() {
    // One of the default ports is taken, by this test or by another process.
    let _taken = TcpListener::bind("127.0.0.1:8100");
    let demo = Demo::start(&["--requests", "0"]);
    demo.is_up();
    let (out, err) = (demo.text("out"), demo.text("err"));
    assert!(
        err.contains("Not at the usual ports") && err.contains("in use"),
        "{err}"
    );
    assert!(!err.contains("WARN") && !err.contains("ERROR"), "{err}");
    let program = env!("CARGO_BIN_EXE_quorate");
    assert!(out.contains(&format!("\n{program} status\n")), "{out}");
    let (_, list) = out.split_once("export QUORATE_ADMIN=").unwrap();
    let admins = list.lines().next().unwrap();
    let mut status = Command::new(program);
    let status = status.arg("status").env("QUORATE_ADMIN", admins);
    assert!(status.output().unwrap().status.success());
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let prompt = out.lines().find(|line| line.starts_with("PROMPT="));
    assert!(readme.contains(prompt.unwrap()), "{prompt:?}");
    // The command in the hint, which fits a terminal.
    let (_, loop_) = out.split_once("for URL in ").unwrap();
    let (sent, _) = loop_.split_once("\ndone").unwrap();
    assert!(sent.lines().all(|line| line.len() <= 70), "{sent}");
    let urls: Vec<&str> = loop_.split(';').next().unwrap().split(' ').collect();
    let prompt = "Tell me about quorums. ".repeat(40);
    let message = json!({ "role": "user", "content": prompt });
    let body = json!({ "model": "emulated", "messages": [message], "max_tokens": 16 }).to_string();
    let hit_at = |url: &str| {
        let address: SocketAddr = url["http://".len()..].parse().unwrap();
        let answer = send(address, "POST", "/v1/chat/completions", "", Some(&body)).unwrap();
        let mut lines = answer.head.lines();
        let hit = lines.find_map(|it| it.strip_prefix("x-quorate-prefix: "));
        hit.unwrap_or_default().to_owned()
    };
    assert_eq!(hit_at(urls[0]), "0/7");
    // It takes a moment until the others apply what one replica has learnt.
    until("the second finds all cached", || hit_at(urls[1]) == "7/7");
    assert_eq!(demo.end("HUP"), 0);
}

#[test]
fn progress_is_printed_in_lines_without_a_terminal() {
    let demo = Demo::start(&["--requests", "1000000", "--port", "0"]);
    let has_line = || {
        let text = demo.text("err");
        text.lines()
            .any(|line| line.contains("/1000000 ") && line.contains("% cached"))
    };
    until("a line of progress", has_line);
    assert!(!demo.text("err").contains('\u{1b}'));
    assert_eq!(demo.end("INT"), 0);
}

#[test]
fn an_unresponsive_engine_is_named() {
    let [nobody] = free();
    let url = format!("http://{nobody}");
    let output = dev_once(&["--backend", &url]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains(&url) && told.contains("refused"), "{told}");
    assert!(!told.contains("ERROR"), "{told}");
}
