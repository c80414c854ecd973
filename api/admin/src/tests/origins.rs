//! Requests that a browser sends for pages of other sites.

use super::*;

/// Builds a request with `headers` and no body.
fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &'static str,
) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    let add = |request: http::request::Builder, (name, value): &(&str, &str)| {
        request.header(*name, *value)
    };
    let request = headers.iter().fold(request, add);
    request.body(Body::from(body)).unwrap()
}

impl Bench {
    async fn status_of(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
        self.send(request(method, path, headers, ""))
            .await
            .status
            .as_u16()
    }
}

#[tokio::test]
async fn the_listener_accepts_only_its_own_host_names() {
    let bench = Bench::with_backends();
    for own in [
        "127.0.0.1:8081",
        "10.1.2.3",
        "[::1]:8081",
        "localhost:8081",
        "LOCALHOST",
        "quorate-1.example:8081",
    ] {
        let host = [("host", own)];
        assert_eq!(
            bench.status_of("GET", "/admin/v1/users", &host).await,
            200,
            "{own}"
        );
    }
    for (foreign, status) in [
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8081", 421),
        ("localhost.evil.example", 421),
        ("quorate-1.example.", 421),
        ("evil@localhost", 400),
        ("a b", 400),
    ] {
        let host = [("host", foreign)];
        for path in ["/admin/v1/users", "/metrics", "/", "/admin/v1/nothing"] {
            assert_eq!(
                bench.status_of("GET", path, &host).await,
                status,
                "{foreign} {path}"
            );
        }
        let drain = "/admin/v1/backends/gpu-1/drain";
        assert_eq!(
            bench.status_of("POST", drain, &host).await,
            status,
            "{foreign}"
        );
        // Load balancers use their own names for a replica.
        assert_eq!(bench.status_of("GET", "/livez", &host).await, 200);
    }
    let two = [("host", "localhost"), ("host", "evil.example")];
    assert_eq!(bench.status_of("GET", "/admin/v1/users", &two).await, 400);
    let target = "http://evil.example/admin/v1/users";
    assert_eq!(bench.status_of("GET", target, &[]).await, 421);
    let target = [("host", "localhost")];
    assert_eq!(
        bench
            .status_of("GET", "http://evil.example/", &target)
            .await,
        400
    );
}

#[tokio::test]
async fn cross_site_writes_are_refused() {
    let bench = Bench::new();
    let snapshot = "/admin/v1/cluster/snapshot";
    let host = ("host", "10.0.0.1:8081");
    for header in [
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
        ("origin", "http://evil.example"),
        ("origin", "http://10.0.0.1:9999"),
        ("origin", "http://10.0.0.1:8081.evil.example"),
        ("origin", "null"),
        ("origin", ""),
    ] {
        let status = bench.status_of("POST", snapshot, &[host, header]).await;
        assert_eq!(status, 403, "{header:?}");
    }
    assert!(bench.cluster.changes.lock().unwrap().is_empty());
    let own = [
        host,
        ("origin", "http://10.0.0.1:8081"),
        ("sec-fetch-site", "same-origin"),
    ];
    assert_eq!(bench.status_of("POST", snapshot, &own).await, 200);
    assert_eq!(bench.status_of("POST", snapshot, &[host]).await, 200);
}

#[tokio::test]
async fn bodies_that_any_web_page_may_send_are_refused() {
    let bench = Bench::new();
    let member = r#"{"id":9,"address":"evil.example:1"}"#;
    let json = "Application/JSON; charset=utf-8";
    for (path, body, right) in [
        ("/admin/v1/cluster/members", member, json),
        ("/admin/v1/cluster/transfer-leader", r#"{"to":2}"#, json),
        (
            "/admin/v1/cluster/restore?force=true",
            "x",
            "application/octet-stream",
        ),
    ] {
        for wrong in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "",
        ] {
            let asked = request("POST", path, &[("content-type", wrong)], body);
            let answer = bench.send(asked).await;
            assert_eq!(answer.status, 415, "{path} {wrong}: {}", answer.body);
            assert_eq!(answer.json()["type"], "/problems/content-type");
        }
        assert_eq!(
            bench.send(request("POST", path, &[], body)).await.status,
            415
        );
        assert!(bench.cluster.changes.lock().unwrap().is_empty());
        let answer = bench
            .send(request("POST", path, &[("content-type", right)], body))
            .await;
        assert_ne!(answer.status, 415, "{path}: {}", answer.body);
        bench.cluster.changes.lock().unwrap().clear();
    }
}
