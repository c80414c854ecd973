//! Tests of the headers that name sessions.

use super::*;

#[test]
fn headers_that_name_sessions_are_read_in_order() {
    let config = config(
        "node.id = 1\n[[sessions.headers]]\nsession = \"X-Chat-Id\"\nparent = \"x-parent\"\n\
         [[sessions.headers]]\nsession = \"session_id\"\n",
    );
    assert!(config.sessions.enabled);
    let headers = config.sessions.headers.iter();
    let headers: Vec<_> = headers
        .map(|it| (&*it.session, it.parent.as_deref()))
        .collect();
    let expected = [("x-chat-id", Some("x-parent")), ("session_id", None)];
    assert_eq!(headers, expected);
}

#[test]
fn headers_that_cannot_name_sessions_are_refused() {
    faults(
        r#"
node.id = 1
[sessions]
enabled = "yes"
header = "x-chat-id"
[[sessions.headers]]
session = "x chat"
[[sessions.headers]]
parent = ""
[[sessions.headers]]
session = "x-chat-id"
[[sessions.headers]]
session = "X-CHAT-ID"
"#,
        expect![[r#"
            4:11: sessions.enabled is "yes" (expected true or false)
            5:1: unknown key sessions.header (expected headers, or another of enabled, headers)
            7:11: sessions.headers[0].session is "x chat" (expected a header's name, such as "x-chat-id")
            8:1: sessions.headers[1].session is not set (expected a header's name, such as "x-chat-id")
            9:10: sessions.headers[1].parent is "" (expected a header's name, such as "x-chat-id")
            13:11: sessions.headers[3].session is "x-chat-id", as is sessions.headers[2].session (expected each session once)
        "#]],
    );
    faults(
        "node.id = 1\n[sessions]\nheaders = \"x-chat-id\"\n",
        expect![[r#"
            3:11: sessions.headers is "x-chat-id" (expected a list of tables: [[sessions.headers]])
        "#]],
    );
    let many = "[[sessions.headers]]\nsession = \"x-chat-N\"\n";
    let many = (0..17).map(|nth| many.replace('N', &nth.to_string()));
    let many = many.collect::<String>();
    faults(
        &format!("node.id = 1\n{many}"),
        expect![[r#"
        2:1: sessions.headers has 17 entries (expected at most 16 entries)
    "#]],
    );
}
