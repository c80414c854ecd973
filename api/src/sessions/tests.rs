//! Tests of sessions' names and their sources.

use http::HeaderValue;
use proptest::prelude::*;

use super::sources::KNOWN_CLIENTS;
use super::*;

/// Session, parent, and whether the turn is the last one.
type Found<'a> = (&'a str, Option<&'a str>, bool);

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name: http::HeaderName = name.parse().unwrap();
        headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}

fn configured(session: &'static str, parent: Option<&'static str>) -> SessionHeaders {
    SessionHeaders {
        session: http::HeaderName::from_static(session),
        parent: parent.map(http::HeaderName::from_static),
    }
}

/// Checks which names a request with these headers gives, and from which source.
#[track_caller]
fn assert_names(fields: &[(&str, &str)], source: &str, expected: Found<'_>) {
    let headers = headers(fields);
    let names = SessionRules::default().names(&headers, None, |_| panic!("refused"));
    let names = names.unwrap();
    assert_eq!(names.source, source);
    let found = (names.session, names.parent, names.is_final);
    assert_eq!(found, expected);
}

#[test]
fn a_client_may_name_its_session_and_parent_for_quorate() {
    let (own, parent) = (
        ("x-quorate-session", " s "),
        ("x-quorate-parent-session", "p"),
    );
    assert_names(&[own], "header:x-quorate-session", ("s", None, false));
    assert_names(
        &[own, parent],
        "header:x-quorate-session",
        ("s", Some("p"), false),
    );
}

#[test]
fn claude_code_names_its_session_and_the_agents_in_it() {
    let session = ("x-claude-code-session-id", "root");
    let agent = ("x-claude-code-agent-id", "a2");
    let parent = ("x-claude-code-parent-agent-id", "a1");
    assert_names(
        &[session],
        "header:x-claude-code-session-id",
        ("root", None, false),
    );
    let source = "header:x-claude-code-agent-id";
    assert_names(&[session, agent], source, ("a2", Some("root"), false));
    assert_names(&[session, agent, parent], source, ("a2", Some("a1"), false));
    assert_names(&[agent], source, ("a2", None, false));
}

#[test]
fn codex_names_its_thread_within_the_session_of_the_tree() {
    let session = ("session-id", "t0");
    assert_names(&[session], "header:session-id", ("t0", None, false));
    let source = "header:thread-id";
    assert_names(&[session, ("thread-id", "t0")], source, ("t0", None, false));
    let child = [session, ("thread-id", "t2")];
    assert_names(&child, source, ("t2", Some("t0"), false));
    let grandchild = [child[0], child[1], ("x-codex-parent-thread-id", "t1")];
    assert_names(&grandchild, source, ("t2", Some("t1"), false));
}

#[test]
fn opencode_names_its_session_and_parent() {
    let fields = [("x-session-id", "s"), ("x-parent-session-id", "p")];
    assert_names(&fields[..1], "header:x-session-id", ("s", None, false));
    assert_names(&fields, "header:x-session-id", ("s", Some("p"), false));
}

#[test]
fn clients_of_dynamo_name_session_and_parent_and_mark_the_last_turn() {
    let source = "header:x-dynamo-session-id";
    let own = ("x-dynamo-session-id", "s");
    let parent = ("x-dynamo-parent-session-id", "p");
    assert_names(&[own, parent], source, ("s", Some("p"), false));
    for (value, is_final) in [
        ("true", true),
        ("True", true),
        ("false", false),
        ("1", false),
    ] {
        let last = ("x-dynamo-session-final", value);
        assert_names(&[own, last], source, ("s", None, is_final));
    }
}

#[test]
fn headers_from_the_config_come_after_known_ones_and_before_the_body() {
    let rules = [
        configured("x-chat-id", Some("x-parent-chat-id")),
        configured("session_id", None),
    ];
    let rules = SessionRules::new(true, &rules);
    let body = BodySessionNames {
        cache_key: Some("k".to_owned()),
        ..BodySessionNames::default()
    };
    let mut fields = vec![("x-parent-chat-id", "q")];
    for (field, expected) in [
        (("x-any", "n"), ("body:prompt_cache_key", "k", None)),
        (("session_id", "s"), ("header:session_id", "s", None)),
        (("x-chat-id", "c"), ("header:x-chat-id", "c", Some("q"))),
        (
            ("x-dynamo-session-id", "d"),
            ("header:x-dynamo-session-id", "d", None),
        ),
    ] {
        fields.push(field);
        let headers = headers(&fields);
        let names = rules
            .names(&headers, Some(&body), |_| panic!("refused"))
            .unwrap();
        assert_eq!((names.source, names.session, names.parent), expected);
    }
}

#[test]
fn a_program_in_the_body_precedes_the_cache_key() {
    let rules = SessionRules::default();
    let of_body = |parent: Option<&str>, root: Option<&str>| {
        let program = ProgramNames {
            program: "p".to_owned(),
            parent: parent.map(ToOwned::to_owned),
            root: root.map(ToOwned::to_owned),
        };
        let body = BodySessionNames {
            program: Some(program),
            cache_key: Some("k".to_owned()),
        };
        let none = HeaderMap::new();
        let names = rules.names(&none, Some(&body), |_| panic!("refused"));
        let names = names.unwrap();
        assert_eq!(
            (names.source, names.session),
            ("body:vllm_xargs.agentic_context", "p")
        );
        names.parent.map(ToOwned::to_owned)
    };
    assert_eq!(of_body(None, None), None);
    assert_eq!(of_body(Some("o"), Some("r")).as_deref(), Some("o"));
    assert_eq!(of_body(None, Some("r")).as_deref(), Some("r"));
    assert_eq!(of_body(None, Some("p")), None, "it is the root itself");
}

#[test]
fn a_name_out_of_bounds_counts_as_absent() {
    let of = |fields: &[(&str, &str)], body: Option<&BodySessionNames>| {
        let (headers, mut refused) = (headers(fields), Vec::new());
        let rules = SessionRules::default();
        let names = rules.names(&headers, body, |source| refused.push(source));
        let names = names.map(|it| (it.session.to_owned(), it.parent.map(ToOwned::to_owned)));
        (names, refused)
    };
    let (longest, long) = (
        "é".repeat(NAME_BYTES_MAX / 2),
        "x".repeat(NAME_BYTES_MAX + 1),
    );
    let none: [&str; 0] = [];
    let (names, refused) = of(&[("x-quorate-session", &longest)], None);
    assert_eq!((names, &*refused), (Some((longest, None)), &none[..]));
    assert_eq!(
        of(&[("x-quorate-session", " \t")], None),
        (None, Vec::new())
    );
    let own = "header:x-quorate-session";
    for bad in [&*long, "a\tb", "a\u{202e}b"] {
        assert_eq!(of(&[("x-quorate-session", bad)], None), (None, vec![own]));
        let fields = [("x-quorate-session", bad), ("x-session-id", "s")];
        let next = Some(("s".to_owned(), None));
        assert_eq!(
            of(&fields, None),
            (next, vec![own]),
            "the next source counts"
        );
        let fields = [
            ("x-quorate-session", "s"),
            ("x-quorate-parent-session", bad),
        ];
        assert_eq!(of(&fields, None), (Some(("s".to_owned(), None)), vec![own]));
        let body = BodySessionNames {
            program: Some(ProgramNames {
                program: bad.to_owned(),
                ..ProgramNames::default()
            }),
            cache_key: Some("k".to_owned()),
        };
        let program = "body:vllm_xargs.agentic_context";
        let next = Some(("k".to_owned(), None));
        assert_eq!(of(&[], Some(&body)), (next, vec![program]));
    }
    let mut latin = HeaderMap::new();
    latin.insert("x-session-id", HeaderValue::from_bytes(b"\xe9").unwrap());
    let mut refused = Vec::new();
    let names = SessionRules::default().names(&latin, None, |source| refused.push(source));
    assert_eq!((names, refused), (None, vec!["header:x-session-id"]));
}

#[test]
fn sessions_that_are_off_have_no_names() {
    let headers = headers(&[("x-quorate-session", "s")]);
    let off = SessionRules::new(false, &[]);
    assert_eq!(off.names(&headers, None, |_| panic!("refused")), None);
}

#[test]
fn a_name_stands_for_one_session_of_one_user() {
    let own = headers(&[("x-session-id", "p")]);
    let child = headers(&[
        ("x-quorate-session", "c"),
        ("x-quorate-parent-session", "p"),
    ]);
    let rules = SessionRules::default();
    let named = |headers: &HeaderMap, seed, user| {
        let names = rules.names(headers, None, |_| panic!("refused"));
        names.unwrap().hashed(seed, UserKey(user))
    };
    let parent = named(&own, 1, 7).key;
    assert_eq!(named(&child, 1, 7).parent, Some(parent));
    assert_ne!(named(&own, 1, 8).key, parent);
    assert_ne!(named(&own, 2, 7).key, parent);
}

#[test]
fn sessions_survive_storage() {
    let fields = [
        ("x-dynamo-session-id", "s"),
        ("x-dynamo-session-final", "true"),
    ];
    let headers = headers(&fields);
    let names = SessionRules::default().names(&headers, None, |_| panic!("refused"));
    let named = names.unwrap().hashed(1, UserKey(7));
    let config = bincode::config::standard();
    let bytes = bincode::encode_to_vec(named, config).unwrap();
    let (read, _): (NamedSession, _) = bincode::decode_from_slice(&bytes, config).unwrap();
    assert_eq!(read, named);
}

/// How a header of a generated request is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Sent {
    Absent,
    Empty,
    Good,
    TooLong,
}

fn any_sent() -> impl Strategy<Value = Sent> {
    use Sent::*;
    prop_oneof![3 => Just(Absent), 1 => Just(Empty), 4 => Just(Good), 1 => Just(TooLong)]
}

proptest! {
    /// Each header's value is its own name, so that a name shows which header it comes from.
    #[test]
    fn names_of_different_clients_are_never_mixed(
        sent in proptest::collection::vec(any_sent(), 3 * KNOWN_CLIENTS.len()),
        has_body in any::<bool>(),
    ) {
        let mut all = KNOWN_CLIENTS.iter().flat_map(|it| [it.session].into_iter().chain(it.parents.iter().copied()));
        let mut headers = HeaderMap::new();
        let mut good = Vec::new();
        for how in sent {
            let Some(name) = all.next() else { break };
            if headers.contains_key(name) {
                continue;
            }
            let value = match how {
                Sent::Absent => continue,
                Sent::Empty => String::new(),
                Sent::Good => name.to_owned(),
                Sent::TooLong => name.repeat(NAME_BYTES_MAX),
            };
            headers.insert(name, value.parse().unwrap());
            if how == Sent::Good {
                good.push(name);
            }
        }
        let body = BodySessionNames { cache_key: Some("body".to_owned()), program: None };
        let body = has_body.then_some(&body);
        let names = SessionRules::default().names(&headers, body, |_| {});
        let mut clients = KNOWN_CLIENTS.iter();
        match clients.find(|client| good.contains(&client.session)) {
            Some(client) => {
                let names = names.unwrap();
                prop_assert_eq!(names.session, client.session);
                let mut parents = client.parents.iter().copied();
                prop_assert_eq!(names.parent, parents.find(|it| good.contains(it)));
            }
            None => {
                prop_assert_eq!(names.map(|it| it.session), body.map(|_| "body"));
                prop_assert_eq!(names.and_then(|it| it.parent), None);
            }
        }
    }
}
