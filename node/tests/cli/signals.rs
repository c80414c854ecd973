//! Reactions of a running replica to signals.

use serde_json::{Value, json};

use super::process::{Answer, Replica, free, send};
use super::{quorate, text};

/// Returns settings of a single replica, with keys in a file.
fn settings(keys: &std::path::Path, level: &str, rest: &str) -> String {
    format!(
        "[users]\napi_keys_file = {keys:?}\n[log]\nlevel = \"{level}\"\nformat = \"json\"\n{rest}"
    )
}

struct Reloaded {
    replica: Replica,
    keys: std::path::PathBuf,
}

impl Reloaded {
    fn start() -> Self {
        let [peer] = free();
        let dir = tempfile::TempDir::new().unwrap();
        let keys = dir.path().join("keys");
        std::fs::write(&keys, "sk-first ada\n").unwrap();
        let config = settings(&keys, "info", "");
        let replica = Replica::start_in(dir, 1, peer, &config, |command| command);
        // Without a backend, it never becomes ready.
        replica.process.says(&["accepting requests"]);
        Self { replica, keys }
    }

    /// Replaces the end of the config, and reloads it with SIGHUP.
    fn reload(&self, level: &str, rest: &str) {
        self.write(level, rest);
        self.replica.process.signal("HUP");
    }

    /// Replaces the end of the config, and reloads it through the admin API.
    fn ask(&self, level: &str, rest: &str) -> Answer {
        self.write(level, rest);
        let path = "/admin/v1/config/reload";
        send(self.replica.admin, "POST", path, "", None).unwrap()
    }

    fn write(&self, level: &str, rest: &str) {
        let file = self.replica.dir.path().join("config.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        let own = text.split_once("[users]").unwrap().0;
        // The config ends in the section `drain`.
        let own = own.replace("deadline = \"2s\"\n", "");
        let rest = settings(&self.keys, level, rest);
        let text = format!("{own}deadline = \"2s\"\n{rest}");
        std::fs::write(&file, text).unwrap();
    }

    fn status_of(&self, key: &str) -> u16 {
        let header = format!("authorization: Bearer {key}\r\n");
        self.replica.chat("m", &header).status
    }

    fn in_effect(&self, key: &str) -> Value {
        self.replica.admin("/admin/v1/config")["keys"][key]["in_effect"].clone()
    }
}

#[test]
fn sighup_applies_reloadable_keys_and_names_the_rest() {
    let reloaded = Reloaded::start();
    assert_eq!(reloaded.status_of("sk-first"), 404);
    std::fs::write(&reloaded.keys, "sk-second ada\n").unwrap();
    reloaded.reload(
        "debug",
        "[limits]\nmax_body = \"1KiB\"\nmax_connections = 50\n\
         [probes]\ninterval = \"3s\"\n[routing]\npolicy = \"random\"\n",
    );
    let said = |texts: &[&str]| reloaded.replica.process.says(texts);
    said(&["INFO", "setting changed", "log.level", "info", "debug"]);
    said(&[
        "WARN",
        "takes effect at a restart",
        "limits.max_connections",
        "16384",
        "50",
    ]);
    for (key, before, after) in [
        ("limits.max_body", "32MiB", "1KiB"),
        ("drain.deadline", "30s", "2s"),
        ("probes.interval", "1s", "3s"),
    ] {
        said(&["setting changed", key, before, after]);
    }
    said(&[
        "WARN",
        "the cluster keeps its own value",
        "routing.policy",
        "random",
    ]);
    said(&["reloaded the config"]);
    assert_eq!(reloaded.status_of("sk-second"), 404);
    assert_eq!(reloaded.status_of("sk-first"), 401);
    assert_eq!(reloaded.in_effect("log.level"), "debug");
    assert_eq!(reloaded.in_effect("limits.max_connections"), 16384);
    assert_eq!(reloaded.in_effect("limits.max_body"), "1KiB");
    let long = format!("{{\"model\":\"{}\"}}", "m".repeat(2000));
    let key = "authorization: Bearer sk-second\r\n";
    let path = "/v1/chat/completions";
    let answer = send(reloaded.replica.data, "POST", path, key, Some(&long)).unwrap();
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (413, Some("request_too_large"))
    );
    // Only this level logs connections that are not HTTP.
    send(reloaded.replica.data, "NO HTTP", "/", "", None);
    said(&["DEBUG", "connection ended"]);
}

#[test]
fn a_broken_config_changes_nothing_on_sighup() {
    let reloaded = Reloaded::start();
    std::fs::write(&reloaded.keys, "sk-second ada\n").unwrap();
    reloaded.reload("inof", "");
    let said = |texts: &[&str]| reloaded.replica.process.says(texts);
    said(&[
        "ERROR",
        "keeping the old one",
        "log.level is",
        "inof",
        "config.toml:",
    ]);
    assert_eq!(reloaded.in_effect("log.level"), "info");
    reloaded.reload("warn", "[nonsense]\n");
    said(&["ERROR", "keeping the old one", "nonsense"]);
    assert_eq!(reloaded.in_effect("log.level"), "info");
}

#[test]
fn a_metric_reports_a_failed_reload() {
    let reloaded = Reloaded::start();
    let shown = || {
        let page = send(reloaded.replica.admin, "GET", "/metrics", "", None).unwrap();
        let mut lines = page.body.lines();
        let found = lines.find_map(|line| line.strip_prefix("quorate_config_reload_failed "));
        found.map(str::to_owned)
    };
    for (level, status, failed) in [("info", 200, "0"), ("inof", 422, "1"), ("warn", 200, "0")] {
        assert_eq!(reloaded.ask(level, "").status, status, "{level}");
        assert_eq!(shown().as_deref(), Some(failed), "{level}");
    }
}

#[test]
fn a_reload_request_reports_its_result() {
    let reloaded = Reloaded::start();
    std::fs::write(&reloaded.keys, "sk-second ada\n").unwrap();
    let answer = reloaded.ask(
        "debug",
        "[limits]\nmax_connections = 50\n[routing]\npolicy = \"random\"\n",
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    let expected = json!({
        "taken": [
            { "key": "drain.deadline", "before": "30s", "after": "2s" },
            { "key": "log.level", "before": "info", "after": "debug" },
        ],
        "need_restart": [
            { "key": "limits.max_connections", "before": 16384, "after": 50 },
        ],
        "cluster_keeps": [
            { "key": "routing.policy", "before": null, "after": "random" },
        ],
        "faults": [],
    });
    assert_eq!(answer.json(), expected);
    assert_eq!(reloaded.status_of("sk-second"), 404);
    assert_eq!(reloaded.in_effect("log.level"), "debug");

    let put = || {
        let body = Some(r#"{"url":"http://127.0.0.1:9"}"#);
        send(
            reloaded.replica.admin,
            "PUT",
            "/admin/v1/backends/a",
            "",
            body,
        )
        .unwrap()
    };
    assert_eq!(put().status, 200);
    let answer = reloaded.ask("debug", "[admin]\nbackends_allow = [\"10.0.0.0/8\"]\n");
    let taken = &answer.json()["taken"];
    assert_eq!(taken[0]["key"], "admin.backends_allow", "{taken}");
    let refused = put();
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(
        refused
            .body
            .contains("127.0.0.1 is not in admin.backends_allow")
    );

    let answer = reloaded.ask("inof", "[nonsense]\n");
    assert_eq!(answer.status, 422, "{}", answer.body);
    let told = answer.json();
    assert_eq!(told["type"], "/problems/config-faults");
    let faults = told["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 2, "{told}");
    for (fault, part) in faults.iter().zip(["inof", "nonsense"]) {
        let place = fault["place"].as_str().unwrap();
        assert!(place.contains("config.toml:"), "{fault}");
        assert!(fault["message"].as_str().unwrap().contains(part), "{fault}");
        assert!(fault["expected"].is_string(), "{fault}");
    }
    assert_eq!(reloaded.in_effect("log.level"), "debug");
}

#[test]
fn the_reload_command_names_keys_that_need_a_restart() {
    let reloaded = Reloaded::start();
    let admin = reloaded.replica.admin.to_string();
    let reload = |level: &str, rest: &str, flags: &[&str]| {
        reloaded.write(level, rest);
        let command = ["config", "reload", "--admin", &*admin];
        let output = quorate(&[&command, flags].concat());
        (output.status.code(), text(&output.stdout).to_owned())
    };
    let (code, told) = reload("debug", "[limits]\nmax_connections = 50\n", &[]);
    assert_eq!(code, Some(0), "{told}");
    assert!(
        told.contains("log.level")
            && told.contains("restart this replica for: limits.max_connections"),
        "{told}"
    );
    let (code, told) = reload("inof", "", &[]);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("log.level is \"inof\""), "{told}");
    let (code, told) = reload("debug", "[limits]\nmax_connections = 50\n", &["--json"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((code, &told[0]["report"]["taken"]), (Some(0), &json!([])));
    assert_eq!(told[0]["report"]["need_restart"][0]["after"], 50);
    // Of several replicas, each is asked, and unreachable ones are reported.
    let [nobody] = free();
    let both = format!("{nobody},{admin}");
    let output = quorate(&["config", "reload", "--admin", &both]);
    let told = text(&output.stdout);
    assert_eq!(
        (output.status.code(), told.lines().count() > 1),
        (Some(1), true),
        "{told}"
    );
}

#[test]
fn the_log_level_command_changes_a_running_replica() {
    let reloaded = Reloaded::start();
    let admin = reloaded.replica.admin.to_string();
    let level = |level: &str, flags: &[&str]| {
        let output = quorate(&[&["log-level", level, "--admin", &*admin], flags].concat());
        let told = format!("{}{}", text(&output.stdout), text(&output.stderr));
        (output.status.code(), told)
    };
    // Only this level logs connections that are not HTTP.
    let nonsense = || send(reloaded.replica.data, "NO HTTP", "/", "", None);
    let is_told = || reloaded.replica.process.log().contains("connection ended");
    nonsense();
    assert!(!is_told());
    let (code, told) = level("debug", &[]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("logs debug"), "{told}");
    // The server may log the end of the connection after the client has seen it.
    nonsense();
    reloaded
        .replica
        .process
        .says(&["DEBUG", "connection ended"]);

    let (code, told) = level("inof", &[]);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("expected error, warn, info"), "{told}");
    let (code, told) = level("warn,api=info", &["--json"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(
        (code, &told[0]["level"]),
        (Some(0), &json!("warn,api=info"))
    );
    let shown = quorate(&["log-level", "--admin", &admin]);
    let shown = text(&shown.stdout);
    assert!(shown.ends_with(": logs warn,api=info\n"), "{shown}");
    // Every replica is asked, and unreachable ones are reported.
    let [nobody] = free();
    let both = format!("{nobody},{admin}");
    let output = quorate(&["log-level", "error", "--admin", &both]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(reloaded.replica.admin("/admin/v1/log")["level"], "error");
}

#[test]
fn other_signals_are_ignored() {
    let mut reloaded = Reloaded::start();
    for (name, number) in [("USR1", 10), ("USR2", 12)] {
        reloaded.replica.process.signal(name);
        let field = format!("\"signal\":{number}");
        reloaded.replica.process.says(&["ignored a signal", &field]);
    }
    assert!(reloaded.replica.process.is_running());
    assert_eq!(reloaded.status_of("sk-first"), 404);
}
