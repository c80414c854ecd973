//! Tests of engines' keys, headers and addresses.

use api::engines::backends::{EngineHeaders, EngineKeys};
use expect_test::expect;

use super::*;

#[test]
fn engine_keys_are_read_and_not_printed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    // As some editors write it.
    std::fs::write(file.path(), "\u{feff}s3cret\n").unwrap();
    let text = format!(
        "node.id = 1\n[probes]\napi_key_file = {0:?}\n\
         [[backends]]\nid = \"a\"\nurl = \"http://a:1/\"\n\
         [[backends]]\nid = \"b\"\nurl = \"http://b:1\"\napi_key_file = {0:?}\n",
        file.path()
    );
    let loaded = layers(&text, &[], &[]).unwrap();
    let mut expected = EngineKeys::default();
    let key = http::HeaderValue::from_static("Bearer s3cret");
    expected.add_for_probes("a", "http://a:1", key.clone());
    expected.add("b", "http://b:1", key);
    assert_eq!(loaded.config.engine_keys, expected);
    assert!(!format!("{:?} {}", loaded.config, print(&loaded)).contains("s3cret"));
}

#[test]
fn an_engine_has_one_backend_however_its_url_is_spelled() {
    let text = |second: &str| {
        format!(
            "node.id = 1\n[[backends]]\nid = \"a\"\nurl = \"http://GPU-1/\"\n\
             [[backends]]\nid = \"b\"\nurl = \"{second}\"\n"
        )
    };
    let shown = brief(&layers(&text("HTTP://gpu-1:80"), &[], &[]).unwrap_err());
    expect![[r#"
        7:7: backends[1].url is "http://gpu-1:80", as is backends[0].url (expected each url once)
    "#]]
    .assert_eq(&shown);
    assert!(layers(&text("https://gpu-1"), &[], &[]).is_ok());
}

#[test]
fn engine_headers_are_read_and_not_printed() {
    let (headers, key) = (
        tempfile::NamedTempFile::new().unwrap(),
        tempfile::NamedTempFile::new().unwrap(),
    );
    std::fs::write(headers.path(), "x-team: s3cret\n").unwrap();
    std::fs::write(key.path(), "k3y\n").unwrap();
    let text = |more: &str| {
        format!(
            "node.id = 1\n[[backends]]\nid = \"a\"\nurl = \"http://a:1/\"\nheaders_file = {:?}\n{more}",
            headers.path()
        )
    };
    let loaded = layers(&text(""), &[], &[]).unwrap();
    let mut expected = EngineKeys::default();
    let read = EngineHeaders::read("x-team: s3cret").unwrap();
    expected.add("a", "http://a:1", read);
    assert_eq!(loaded.config.engine_keys, expected);
    assert_eq!(loaded.config.secret_files, [headers.path().to_owned()]);
    assert!(!format!("{:?} {}", loaded.config, print(&loaded)).contains("s3cret"));
    let both = text(&format!("api_key_file = {:?}\n", key.path()));
    let told = brief(&layers(&both, &[], &[]).unwrap_err());
    assert!(
        told.contains("backends[0].headers_file is set beside api_key_file"),
        "{told}"
    );
    std::fs::write(headers.path(), "s3cret\n").unwrap();
    let told = brief(&layers(&text(""), &[], &[]).unwrap_err());
    assert!(told.contains("line 1: expected name: value"), "{told}");
    assert!(!told.contains("s3cret"), "{told}");
}

#[test]
fn engine_roles_are_read_from_the_config() {
    use state::command::BackendRole;

    let text =
        |role: &str| format!("node.id = 1\n[[backends]]\nid = \"a\"\nurl = \"http://a:1\"\n{role}");
    let role = |line: &str| layers(&text(line), &[], &[]).map(|it| it.config.backends[0].role);
    assert_eq!(role("").unwrap(), BackendRole::Both);
    assert_eq!(role("role = \"decode\"").unwrap(), BackendRole::Decode);
    let told = brief(&role("role = \"decoder\"").unwrap_err());
    assert!(told.contains("backends[0].role"), "{told}");
}

#[test]
fn configured_engines_must_be_at_allowed_addresses() {
    let told = |allowed: &str, backend: &str| {
        let text = format!(
            "node.id = 1\n[admin]\nbackends_allow = [{allowed}]\n[[backends]]\nid = \"a\"\n{backend}\n"
        );
        layers(&text, &[], &[]).map(drop).map_err(|it| brief(&it))
    };
    let metadata = "url = \"http://169.254.169.254\"";
    let refused = told("", metadata).unwrap_err();
    assert!(
        refused.contains("backends[0].url: 169.254.169.254 is a link-local address"),
        "{refused}"
    );
    assert_eq!(told("\"169.254.169.254\"", metadata), Ok(()));
    let named = "url = \"http://gpu-1:8000\"";
    assert_eq!(told("\"gpu-1\", \"*.b\"", named), Ok(()));
    let refused = told("\"*.b\"", named).unwrap_err();
    assert!(
        refused.contains("gpu-1 is not in admin.backends_allow"),
        "{refused}"
    );
    let socket = "url = \"http://gpu-1:8000\"\nkv_events = \"ipc:///run/vllm/kv\"";
    let refused = told("\"gpu-1.\"", socket).unwrap_err();
    assert!(
        refused.contains("backends[0].kv_events: ipc:///run/vllm/kv is not in"),
        "{refused}"
    );
    let refused = told("\"http://a\"", named).unwrap_err();
    assert!(refused.contains("admin.backends_allow[0]"), "{refused}");
}
