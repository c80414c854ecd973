//! The example of docs/guide/production.md as written, with files and ports of this test.

use super::access::token;
use super::process::{Engine, Replica, free, get, get_over_tls, private_file, send, until};
use super::quorate;

/// Returns the first config in the guide.
fn example() -> String {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/production.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let (_, rest) = guide.split_once("```toml\n").unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

/// Replaces the example's names with those of this machine.
fn put(text: &str, replaced: &[(&str, String)]) -> String {
    replaced
        .iter()
        .fold(text.to_owned(), |text, (before, after)| {
            assert!(text.contains(before), "{before} in {text}");
            text.replace(before, after)
        })
}

/// Starts the example's replica with this engine and this line of tokens. Its own admin address is
/// 127.0.0.2.
fn start(engine: &Engine, tokens: &str) -> Replica {
    let dir = tempfile::TempDir::new().unwrap();
    let [data, admin, peer] = free();
    let all = |port: u16| format!("0.0.0.0:{port}");
    let private = |name: &str, text: &str| private_file(dir.path(), name, text);
    let data_dir = dir.path().join("data").display().to_string();
    let certs = dir.path().join("certs").display().to_string();
    for args in [&["ca"][..], &["node", "--replica", "1=127.0.0.2"]] {
        let args = [&["cert"], args, &["--out", &certs]].concat();
        assert!(quorate(&args).status.success(), "{args:?}");
    }
    let replaced = [
        ("/var/lib/quorate", data_dir),
        ("/etc/quorate/secret", private("secret", &"s".repeat(40))),
        ("/etc/quorate/keys", private("keys", "sk-1 ada\n")),
        ("/etc/quorate/tokens", private("tokens", tokens)),
        ("/etc/quorate/replica-1", format!("{certs}/replica-1")),
        ("0.0.0.0:8080", all(data.port())),
        ("10.0.0.1:8081", format!("127.0.0.2:{}", admin.port())),
        ("0.0.0.0:8082", all(peer.port())),
        ("10.0.0.1", "127.0.0.2".to_owned()),
        ("quorate-peers:8082", format!("localhost:{}", peer.port())),
        ("bootstrap_expect = 3", "bootstrap_expect = 1".to_owned()),
        ("http://10.0.1.1:8000", engine.url.clone()),
    ];
    let text = put(&example(), &replaced);
    let own_admin = ([127, 0, 0, 2], admin.port()).into();
    Replica::start_text(dir, &text, [data, own_admin])
}

#[test]
fn the_production_example_can_be_probed_and_scraped() {
    let engine = Engine::start();
    let (secret, line) = token("prometheus", "viewer");
    let replica = start(&engine, &line);
    let data = replica.data;
    until("it is ready", || {
        get(data, "/readyz").is_some_and(|answer| answer.status == 200)
    });
    // A load balancer checks the data listener, without a key.
    for path in ["/health", "/ping", "/readyz"] {
        let answer = get(data, path).unwrap();
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (200, "{\"status\":\"ready\"}")
        );
    }
    assert_eq!(get(data, "/livez").unwrap().status, 200);
    let head = send(data, "HEAD", "/health", "", None).unwrap();
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(replica.chat("emulated", "").status, 401);
    let key = "authorization: Bearer sk-1\r\n";
    assert_eq!(replica.chat("emulated", key).status, 200);
    // Prometheus reaches the admin listener at its own address. No other address works.
    let ca = replica.dir.path().join("certs/ca.crt");
    let scrape = |headers: &str| get_over_tls(replica.admin, &ca, "/metrics", headers).unwrap();
    assert_eq!(scrape("").status, 401);
    let credentials = format!("authorization: Bearer {secret}\r\n");
    let metrics = scrape(&credentials);
    assert_eq!(metrics.status, 200);
    let counted = |line: &str| {
        metrics
            .body
            .contains(&format!("\nquorate_proxy_requests_total{{{line}\n"))
    };
    assert!(
        counted("outcome=\"finished\",code=\"200\"} 1"),
        "{}",
        metrics.body
    );
    assert!(
        counted("outcome=\"refused\",code=\"401\"} 1"),
        "{}",
        metrics.body
    );
    assert!(
        !metrics
            .body
            .contains("\nquorate_proxy_requests_total{outcome=\"local\""),
        "probes are no requests"
    );
    let elsewhere = ([127, 0, 0, 1], replica.admin.port()).into();
    assert!(get(elsewhere, "/metrics").is_none(), "another address");
    replica.process.signal("TERM");
    replica.process.says(&["draining"]);
    let leaving = get(data, "/health").map(|answer| answer.status);
    assert!(leaving.is_none_or(|status| status == 503), "{leaving:?}");
}
