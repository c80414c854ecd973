//! Deletion of users.

use super::process::{Engine, Replica, free, send, until};

#[test]
fn a_deleted_user_is_removed_and_may_return_as_new() {
    let engine = Engine::start();
    let [peer] = free();
    let config = format!("[[backends]]\nid = \"e\"\nurl = \"{}\"\n", engine.url);
    let replica = Replica::start(1, peer, &config);
    replica.ready();
    let path = "/admin/v1/users/ada";
    let user = |method: &str, body: Option<&str>| {
        let answer = send(replica.admin, method, path, "", body).unwrap();
        (answer.status, answer.json())
    };
    assert_eq!(user("DELETE", None).0, 404);
    assert_eq!(user("PUT", Some(r#"{"weight_milli":3000}"#)).0, 200);
    let chat = || replica.chat("emulated", "x-quorate-user: ada\r\n").status;
    let is_charged = || {
        let (status, told) = user("GET", None);
        status == 200 && told["total"]["requests"] == 1 && told["in_flight"] == 0
    };
    until("the engine serves", || chat() == 200);
    until("the request is charged", is_charged);
    assert_eq!(user("GET", None).1["weight_milli"], 3000);

    let (status, deleted) = user("DELETE", None);
    assert_eq!(
        (status, &deleted["outcome"]),
        (200, &"committed".into()),
        "{deleted}"
    );
    assert_eq!(user("GET", None).0, 404);
    let audit = replica.admin("/admin/v1/audit");
    assert_eq!(audit["writes"][0]["action"], "delete-user", "{audit}");
    // A deleted user's next request creates the user again.
    assert_eq!(chat(), 200);
    until("the request is charged", is_charged);
    assert_eq!(user("GET", None).1["weight_milli"], 1000);
}
