//! The commands for operating a cluster, against a replica.

use std::io::Write;
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use super::process::{Engine, Replica, free, get, program, until};

/// Runs commands against one replica.
struct Operator {
    _engine: Engine,
    replica: Replica,
}

impl Operator {
    fn new() -> Self {
        let engine = Engine::start();
        let [peer] = free();
        let config = format!("[[backends]]\nid = \"a\"\nurl = \"{}\"\n", engine.url);
        let replica = Replica::start(1, peer, &config);
        replica.ready();
        Self {
            _engine: engine,
            replica,
        }
    }

    fn run(&self, args: &str) -> Output {
        let admin = format!("http://{}", self.replica.admin);
        let mut all: Vec<&str> = args.split(' ').collect();
        all.extend(["--admin", &admin]);
        let mut command = program(env!("CARGO_BIN_EXE_quorate"), &all);
        command.output().unwrap()
    }

    /// Runs a command that must succeed; returns its output.
    fn done(&self, args: &str) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must fail; returns its error.
    fn refused(&self, args: &str) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(1), "{args}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn json(&self, args: &str) -> Value {
        serde_json::from_str(&self.done(&format!("{args} --json"))).unwrap()
    }

    /// Runs a command that reads a document from stdin.
    fn fed(&self, args: &str, document: &Value) {
        let admin = format!("http://{}", self.replica.admin);
        let mut all: Vec<&str> = args.split(' ').collect();
        all.extend(["--file", "-", "--admin", &admin]);
        let mut command = program(env!("CARGO_BIN_EXE_quorate"), &all);
        let command = command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(document.to_string().as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args}: {output:?}");
    }
}

#[test]
fn backends_are_added_changed_drained_and_removed() {
    let operator = Operator::new();
    let added = operator.done("backend add b http://127.0.0.1:1 --model m --label zone=x");
    assert!(
        added.starts_with("backend b: registered (log index "),
        "{added}"
    );
    let refused = operator.refused("backend add b http://127.0.0.1:1");
    assert!(refused.contains("quorate backend set b"), "{refused}");
    operator.done("backend set b --label rack=2 --capacity-blocks 12");
    let b = operator.json("backend show b");
    assert_eq!(b["models"], json!(["m"]));
    assert_eq!(b["labels"], json!({ "rack": "2", "zone": "x" }));
    assert_eq!(b["capacity_blocks"], 12);
    operator.done("backend set b --unset labels --unset capacity_blocks");
    let b = operator.json("backend show b");
    assert_eq!(
        (&b["labels"], &b["capacity_blocks"]),
        (&json!({}), &Value::Null)
    );
    operator.done("backend drain a --wait 30s");
    assert_eq!(operator.replica.chat("emulated", "").status, 503);
    operator.done("backend undrain a");
    until("the backend is used again", || {
        operator.replica.chat("emulated", "").status == 200
    });
    operator.done("backend remove b");
    let gone = operator.refused("backend show b");
    assert_eq!(gone.matches("no backend has the id").count(), 1, "{gone}");
    assert!(
        !gone.to_lowercase().contains("not found: not found"),
        "{gone}"
    );
}

#[test]
fn writes_are_audited() {
    let operator = Operator::new();
    operator.done("user set ada --weight 2");
    operator.refused("user delete nobody");
    let writes = operator.done("audit");
    let mut lines = writes.lines();
    assert!(lines.next().unwrap().contains("action"), "{writes}");
    // The newest entry comes first. Writes through this replica have an address.
    let newest = lines.next().unwrap();
    for part in ["configure-user", "ada", "127.0.0.1"] {
        assert!(newest.contains(part), "{writes}");
    }
    assert!(writes.contains("found-cluster"), "{writes}");
    assert_eq!(operator.done("audit --limit 1").lines().count(), 2);
    let calls = operator.done("audit --calls");
    let refused = calls.lines().nth(1).unwrap();
    for part in ["DELETE", "/admin/v1/users/nobody", "404"] {
        assert!(refused.contains(part), "{calls}");
    }
    assert_eq!(operator.json("audit")["writes"][0]["subject"], "ada");
}

#[test]
fn policies_admission_and_users_can_be_set() {
    let operator = Operator::new();
    operator.done("settings set policy prefix-cache imbalance_abs_count=8");
    let policy = operator.done("settings get policy");
    assert!(
        policy.starts_with("policy ") && policy.contains("prefix-cache"),
        "{policy}"
    );
    assert_eq!(
        operator.json("settings get policy")["config"]["imbalance_abs_count"],
        8
    );
    operator.done("settings set policy session --model m");
    assert_eq!(
        operator.json("settings get policy --model m")["config"]["policy"],
        "session"
    );
    operator.done("settings set policy --unset --model m");
    assert_eq!(
        operator.json("settings get policy --model m")["is_of_model"],
        false
    );
    let refused = operator.refused("settings set policy nonsense");
    assert!(
        refused.contains("nonsense") && refused.contains("least-request"),
        "{refused}"
    );

    operator.done("settings set admission max_queue=77 max_wait=20s");
    let admission = operator.json("settings get admission")["config"].clone();
    assert_eq!(admission["max_queue"], 77);
    assert_eq!(admission["max_wait"], "20s");
    operator.done("settings set admission max_wait=null");
    let admission = operator.json("settings get admission")["config"].clone();
    assert_eq!(admission["max_queue"], 77);
    assert_eq!(admission["max_wait"], "10s");
    operator.done("settings set routing prediction_off_permille=300");

    operator.done("user set ada --weight 1.5 --requests 5");
    operator.done("user set ada --window 1m");
    operator.done("user set ada --cache group:team");
    let ada = operator.json("user show ada")["config"].clone();
    assert_eq!(
        (&ada["weight_milli"], &ada["cache"]),
        (&json!(1500), &json!("group:team"))
    );
    assert_eq!(
        (&ada["limits"]["requests"], &ada["limits"]["window"]),
        (&json!(5), &json!("1m"))
    );
    operator.done("user forgive ada");
    operator.done("user set ada --no-limits --cache default");
    let ada = operator.json("user show ada")["config"].clone();
    assert_eq!(ada, json!({ "weight_milli": 1500 }));
    operator.done("user set defaults --weight 3");
    assert_eq!(operator.json("user show defaults")["name"], "defaults");
    operator.done("user defaults set cache=isolated");
    let defaults = operator.json("user defaults get")["config"].clone();
    assert_eq!(
        (&defaults["weight_milli"], &defaults["cache"]),
        (&json!(1000), &json!("isolated"))
    );
    operator.done("user delete ada");
    operator.refused("user show ada");
    operator.refused("user set ada");
}

#[test]
fn shown_settings_can_be_written_back() {
    let operator = Operator::new();
    // A user without any settings.
    assert_eq!(operator.replica.chat("emulated", "").status, 200);
    operator.done("user set ada --weight 2 --tokens 500");
    for (shown, written) in [
        ("backend show a", "backend set a"),
        ("user show anonymous", "user set anonymous"),
        ("user show ada", "user set ada"),
        ("settings get policy", "settings set policy"),
        (
            "settings get policy --model m",
            "settings set policy --model m",
        ),
        ("settings get routing", "settings set routing"),
        ("settings get admission", "settings set admission"),
    ] {
        let before = operator.json(shown);
        operator.fed(written, &before);
        let after = operator.json(shown);
        let settings = [
            "config",
            "is_of_model",
            "url",
            "models",
            "labels",
            "capacity_blocks",
            "incarnation",
            "slot",
            "weight_milli",
        ];
        for name in settings {
            assert_eq!(before[name], after[name], "{shown}: {name}");
        }
    }
}

#[test]
fn commands_use_a_replica_that_can_answer() {
    let operator = Operator::new();
    let [nobody, peer, other_peer] = free();
    // A replica that waits for a peer has no quorum.
    let waiting = format!("[cluster]\npeers = [\"{peer}\", \"{other_peer}\"]\n");
    let waiting = Replica::start(2, peer, &waiting);
    until("it answers", || get(waiting.admin, "/livez").is_some());
    let all = format!(
        "{nobody},http://{},{}",
        waiting.admin, operator.replica.admin
    );
    let run = |args: &[&str]| {
        let args = [args, &["--admin", &all]].concat();
        let output = program(env!("CARGO_BIN_EXE_quorate"), &args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run(&["backend", "drain", "a"]).contains("gets no new requests"));
    run(&["user", "set", "ada", "--weight", "2"]);
    let nobody = format!("{nobody},127.0.0.1:1");
    let args = ["status", "--admin", &nobody];
    let output = program(env!("CARGO_BIN_EXE_quorate"), &args)
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("no replica responds") && told.contains("127.0.0.1:1"),
        "{told}"
    );
}

#[test]
fn the_events_command_begins_with_past_events_and_follows() {
    let operator = Operator::new();
    let dir = tempfile::TempDir::new().unwrap();
    let seen = dir.path().join("events");
    let admin = format!("http://{}", operator.replica.admin);
    let mut events = program(
        env!("CARGO_BIN_EXE_quorate"),
        &["events", "--last", "1024", "--admin", &admin],
    );
    let events = events.stdout(std::fs::File::create(&seen).unwrap());
    let mut child = events.spawn().unwrap();
    let lines = || std::fs::read_to_string(&seen).unwrap();
    until("what was before is told", || {
        lines().contains("  backend  id=a change=added\n")
    });
    operator.done("backend drain a");
    until("the event is told", || {
        lines().contains("  backend  id=a change=draining\n")
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn events_continue_at_another_replica() {
    let [first, second] = free();
    let [mut first, second] = [Replica::start(1, first, ""), Replica::start(1, second, "")];
    for replica in [&first, &second] {
        until("it answers", || get(replica.admin, "/livez").is_some());
    }
    let dir = tempfile::TempDir::new().unwrap();
    let seen = dir.path().join("events");
    let both = format!("{},{}", first.admin, second.admin);
    let args = ["events", "--json", "--admin", &both];
    let mut events = program(env!("CARGO_BIN_EXE_quorate"), &args);
    let events = events.stdout(std::fs::File::create(&seen).unwrap());
    let mut child = events.stderr(Stdio::null()).spawn().unwrap();
    let connected = || {
        let lines = std::fs::read_to_string(&seen).unwrap();
        lines.matches("\"connected\"").count()
    };
    until("it is connected", || connected() == 1);
    first.process.signal("KILL");
    until("it is gone", || !first.process.is_running());
    until("it is connected again", || connected() == 2);
    // The replica does not know the events in between, and reports that.
    until("it is told", || {
        std::fs::read_to_string(&seen)
            .unwrap()
            .contains("\"missed\"")
    });
    child.kill().unwrap();
    child.wait().unwrap();
}
