//! The access log on standard error, as JSON and as text.

use serde_json::Value;

use super::process::{Replica, free};

/// Starts a replica that logs all requests in this format.
fn logging(format: &str) -> Replica {
    let [peer] = free();
    let config = format!("[log]\naccess = \"all\"\nformat = \"{format}\"\n");
    let replica = Replica::start(1, peer, &config);
    replica.process.says(&["accepting requests"]);
    replica
}

/// Sends a request, and returns its id.
fn request(replica: &Replica, model: &str) -> String {
    let answer = replica.chat(model, "");
    assert_eq!(answer.status, 404, "{}", answer.body);
    let mut lines = answer.head.lines();
    let id = lines.find_map(|line| line.strip_prefix("x-request-id: "));
    id.unwrap().to_owned()
}

#[test]
fn json_lines_have_every_field() {
    let replica = logging("json");
    let id = request(&replica, r#"a \"b\" = c"#);
    replica.process.says(&[&id, "}"]);
    let log = replica.process.log();
    let line = log.lines().find(|line| line.contains(&id)).unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["target"], "quorate::access");
    assert_eq!(line["request_id"], id);
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["model"], r#"a "b" = c"#);
    assert_eq!(line["path"], "/v1/chat/completions");
    assert_eq!(line["status"], 404);
    humantime::parse_rfc3339(line["timestamp"].as_str().unwrap()).unwrap();
}

#[test]
fn text_lines_have_fields_by_name() {
    let replica = logging("text");
    let id = request(&replica, "m");
    let has_id = format!("request_id=\"{id}\"");
    replica
        .process
        .says(&["INFO quorate::access", &has_id, "status=404", "model=\"m\""]);
}
