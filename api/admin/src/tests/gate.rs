//! Tokens, roles and the audit.

use std::net::{IpAddr, SocketAddr};

use expect_test::{Expect, expect};

use super::super::gate::CallerAddress;
use super::super::roles::Permission;
use super::super::tokens::TokenEntry;
use super::*;

/// Tokens of operators, one per role, weakest role first.
struct Tokens {
    secrets: Vec<String>,
    set: AdminTokens,
}

impl Tokens {
    fn new() -> Self {
        let mut lines = String::new();
        let drawn = AdminRole::ALL.map(|role| NewToken::draw(&format!("a-{role}"), role).unwrap());
        let secrets = drawn.map(|token| {
            lines.push_str(&token.line);
            lines.push('\n');
            token.secret
        });
        let set = AdminTokens::default();
        set.replace(read_tokens(&lines).unwrap());
        Self {
            secrets: secrets.into(),
            set,
        }
    }

    fn of(&self, role: AdminRole) -> String {
        let nth = AdminRole::ALL.iter().position(|it| *it == role).unwrap();
        format!("Bearer {}", self.secrets[nth])
    }

    fn bench(&self) -> Bench {
        let bench = Bench::guarded(Some(self.set.clone()), false);
        bench.apply(Command::PutBackend(spec("gpu-1")));
        bench
    }
}

#[tokio::test]
async fn a_caller_with_a_token_learns_its_role() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    for role in AdminRole::ALL {
        let asked = call_of(("GET", "/admin/v1/whoami"), Some(&tokens.of(role)), None);
        let told = bench.send(asked).await.json();
        let expected = json!({
            "replica": 1,
            "name": format!("a-{role}"),
            "role": role.name(),
            "by": "token",
        });
        assert_eq!(told, expected);
    }
}

#[tokio::test]
async fn the_console_is_public_and_its_data_is_not() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let page = bench.send(call_of(("GET", "/"), None, None)).await;
    assert_eq!(page.status, StatusCode::OK);
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    let script = bench
        .send(call_of(("GET", "/console/app.js"), None, None))
        .await;
    assert_eq!(
        script.headers["content-type"],
        "text/javascript; charset=utf-8"
    );
    assert_eq!(script.headers["x-content-type-options"], "nosniff");
    let mut again = call_of(("GET", "/console/app.js"), None, None);
    let tag = script.headers["etag"].clone();
    again.headers_mut().insert("if-none-match", tag);
    assert_eq!(bench.send(again).await.status, StatusCode::NOT_MODIFIED);
    for path in ["/console/none.js", "/console/../app.js"] {
        let none = bench.send(call_of(("GET", path), None, None)).await;
        assert_ne!(none.status, StatusCode::OK, "{path}");
    }
    for path in [
        "/admin/v1",
        "/admin/v1/cluster",
        "/admin/v1/events",
        "/admin/v1/whoami",
    ] {
        let refused = bench.send(call_of(("GET", path), None, None)).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{path}");
    }
}

fn call_of(
    (method, path): (&str, &str),
    authorization: Option<&str>,
    from: Option<SocketAddr>,
) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    let mut request = request.header("content-type", "application/json");
    if let Some(authorization) = authorization {
        request = request.header("authorization", authorization);
    }
    let mut request = request.body(Body::empty()).unwrap();
    if let Some(from) = from {
        request.extensions_mut().insert(CallerAddress(from));
    }
    request
}

impl Bench {
    /// Returns the status of a call without reading the response, which may be endless.
    async fn status_for(&self, asked: (&str, &str), authorization: Option<&str>) -> u16 {
        let request = call_of(asked, authorization, None);
        let response = self.api.clone().oneshot(request).await.unwrap();
        response.status().as_u16()
    }
}

/// Replaces the variables of a path from the table of routes by example values.
fn path_of(route: &str) -> String {
    let path = route.replace("{id}", "7").replace("{name}", "ada");
    path.replace("{hash}", "00000000000000a2")
        .replace("{request_id}", "r")
}

/// Lists every call with the permission it requires.
fn listing() -> String {
    let mut listing = String::new();
    for route in ROUTES {
        for call in route.calls {
            let needed = match call.permission {
                Permission::Open => "-",
                Permission::Scrape => "viewer, or admin.metrics_public",
                Permission::Role(role) => role.name(),
            };
            listing.push_str(&format!("{} {}: {needed}\n", call.method, route.path));
        }
    }
    listing
}

/// A new route's permission must be decided here.
const PERMISSIONS: Expect = expect![[r#"
    GET /: -
    GET /console/{file}: -
    GET /admin/v1: viewer
    GET /livez: -
    GET /readyz: -
    GET /metrics: viewer, or admin.metrics_public
    GET /admin/v1/openapi.json: viewer
    GET /admin/v1/cluster: viewer
    GET /admin/v1/whoami: viewer
    GET /admin/v1/replicas: viewer
    POST /admin/v1/cluster/members: admin
    DELETE /admin/v1/cluster/members/{id}: admin
    POST /admin/v1/cluster/members/{id}/promote: admin
    POST /admin/v1/cluster/transfer-leader: operator
    POST /admin/v1/cluster/snapshot: operator
    GET /admin/v1/cluster/backup: admin
    POST /admin/v1/cluster/restore: admin
    GET /admin/v1/digest: viewer
    GET /admin/v1/backends: viewer
    GET /admin/v1/backends/{id}: viewer
    PUT /admin/v1/backends/{id}: operator
    DELETE /admin/v1/backends/{id}: operator
    POST /admin/v1/backends/{id}/drain: operator
    POST /admin/v1/backends/{id}/undrain: operator
    GET /admin/v1/discovery: viewer
    GET /admin/v1/users: viewer
    GET /admin/v1/users/defaults: viewer
    PUT /admin/v1/users/defaults: operator
    GET /admin/v1/users/{name}: viewer
    PUT /admin/v1/users/{name}: operator
    DELETE /admin/v1/users/{name}: operator
    POST /admin/v1/users/{name}/forgive: operator
    GET /admin/v1/usage: viewer
    GET /admin/v1/sessions: viewer
    GET /admin/v1/sessions/{id}: viewer
    GET /admin/v1/session-trees: viewer
    GET /admin/v1/session-trees/{root}: viewer
    DELETE /admin/v1/session-trees/{root}: operator
    GET /admin/v1/waiting: viewer
    GET /admin/v1/keys: viewer
    POST /admin/v1/keys: operator
    GET /admin/v1/keys/{id}: viewer
    DELETE /admin/v1/keys/{id}: operator
    POST /admin/v1/keys/{id}/rotate: operator
    GET /admin/v1/ownership: viewer
    GET /admin/v1/ownership/prefixes: viewer
    GET /admin/v1/blocks/{hash}: viewer
    POST /admin/v1/explain: viewer
    GET /admin/v1/decisions: viewer
    GET /admin/v1/decisions/{request_id}: viewer
    GET /admin/v1/recordings: viewer
    POST /admin/v1/recordings: operator
    GET /admin/v1/recordings/last: viewer
    GET /admin/v1/recordings/{id}: viewer
    DELETE /admin/v1/recordings/{id}: operator
    POST /admin/v1/recordings/{id}/stop: operator
    POST /admin/v1/policy/what-if: viewer
    GET /admin/v1/policy: viewer
    PUT /admin/v1/policy: operator
    DELETE /admin/v1/policy: operator
    GET /admin/v1/routing: viewer
    PUT /admin/v1/routing: operator
    GET /admin/v1/config: viewer
    POST /admin/v1/config/reload: operator
    GET /admin/v1/log: viewer
    PUT /admin/v1/log: operator
    GET /admin/v1/bins: viewer
    GET /admin/v1/admission: viewer
    PUT /admin/v1/admission: operator
    GET /admin/v1/audit: viewer
    GET /admin/v1/events: viewer"#]];

#[test]
fn every_route_requires_a_role() {
    PERMISSIONS.assert_eq(listing().trim_end());
}

#[tokio::test]
async fn the_route_table_lists_every_method() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let admin = tokens.of(AdminRole::Admin);
    for route in ROUTES {
        for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let like = if method == "HEAD" { "GET" } else { method };
            let is_listed = route.calls.iter().any(|call| call.method == like);
            let path = path_of(route.path);
            let is_taken = bench.status_for((method, &path), Some(&admin)).await != 405;
            assert_eq!(is_taken, is_listed, "{method} {}", route.path);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn routes_accept_only_the_roles_of_the_table() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    for route in ROUTES {
        for call in route.calls {
            let (path, permission) = (path_of(route.path), call.permission);
            let asked = (call.method.as_str(), path.as_str());
            let is_open = permission == Permission::Open;
            for wrong in [
                None,
                Some("Bearer wrong"),
                Some("Basic YTpi"),
                Some("Bearer "),
            ] {
                let status = bench.status_for(asked, wrong).await;
                assert_eq!(status != 401, is_open, "{asked:?} {wrong:?} {status}");
                // Let the source's token bucket refill, so that no call is slowed down.
                tokio::time::advance(std::time::Duration::from_secs(60)).await;
            }
            for role in AdminRole::ALL {
                let status = bench.status_for(asked, Some(&tokens.of(role))).await;
                let may = role >= permission.role();
                assert_eq!(status != 403, may, "{asked:?} {role} {status}");
                assert_ne!(status, 401, "{asked:?} {role}");
            }
        }
    }
}

#[tokio::test]
async fn refusals_disclose_no_details() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let mut told = Vec::new();
    for authorization in [None, Some("Bearer wrong")] {
        for path in [
            "/admin/v1/users",
            "/admin/v1/nothing",
            "/admin/v1/backends/none",
        ] {
            let answer = bench
                .send(call_of(("GET", path), authorization, None))
                .await;
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
            told.push((answer.status, answer.body));
        }
    }
    let expected = r#"{"type":"/problems/unauthorized","title":"unauthorized","status":401}"#;
    for (status, body) in told {
        assert_eq!((status.as_u16(), body.as_str()), (401, expected));
    }
    let viewer = tokens.of(AdminRole::Viewer);
    let asked = ("POST", "/admin/v1/backends/gpu-1/drain");
    let answer = bench.send(call_of(asked, Some(&viewer), None)).await;
    assert_eq!(answer.status, 403);
    assert_eq!(answer.json()["needed_role"], "operator");
    let unknown = ("GET", "/admin/v1/nothing");
    assert_eq!(bench.status_for(unknown, Some(&viewer)).await, 404);
}

#[tokio::test]
async fn metrics_can_be_public() {
    let tokens = Tokens::new();
    let bench = Bench::guarded(Some(tokens.set.clone()), true);
    assert_eq!(bench.status_for(("GET", "/metrics"), None).await, 200);
    assert_eq!(
        bench.status_for(("GET", "/admin/v1/users"), None).await,
        401
    );
}

#[tokio::test(start_paused = true)]
async fn token_guesses_are_slowed_by_source() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let asked = ("GET", "/admin/v1/policy");
    let status = async |authorization: &str, from: &str| {
        let from = SocketAddr::new(from.parse::<IpAddr>().unwrap(), 1);
        let request = call_of(asked, Some(authorization), Some(from));
        bench.send(request).await
    };
    let viewer = tokens.of(AdminRole::Viewer);
    for _ in 0..10 {
        assert_eq!(status("Bearer guess", "2001:db8::1").await.status, 401);
    }
    let slowed = status("Bearer guess", "2001:db8::2").await;
    assert_eq!(slowed.status, 429, "the same network");
    assert_eq!(slowed.headers["retry-after"], "2");
    assert_eq!(status(&viewer, "2001:db8::1").await.status, 429);
    assert_eq!(status(&viewer, "10.0.0.1").await.status, 200);
    tokio::time::advance(std::time::Duration::from_secs(2)).await;
    assert_eq!(status(&viewer, "2001:db8::1").await.status, 200);
    // Correct tokens consume nothing.
    for _ in 0..20 {
        assert_eq!(status(&viewer, "10.0.0.2").await.status, 200);
    }
    let page = bench
        .send(call_of(("GET", "/metrics"), Some(&viewer), None))
        .await
        .body;
    assert!(
        page.contains("quorate_admin_refused_total{reason=\"token\"} 10\n"),
        "{page}"
    );
    assert!(
        page.contains("quorate_admin_refused_total{reason=\"slowed\"} 2\n"),
        "{page}"
    );
}

#[tokio::test]
async fn tokens_can_be_replaced_during_calls() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let viewer = tokens.of(AdminRole::Viewer);
    let asked = ("GET", "/admin/v1/policy");
    assert_eq!(bench.status_for(asked, Some(&viewer)).await, 200);
    let other: Vec<TokenEntry> =
        read_tokens(&NewToken::draw("b", AdminRole::Admin).unwrap().line).unwrap();
    tokens.set.replace(other);
    assert_eq!(bench.status_for(asked, Some(&viewer)).await, 401);
}

#[tokio::test]
async fn writes_are_audited_with_author_and_address() {
    let tokens = Tokens::new();
    let bench = tokens.bench();
    let from = SocketAddr::from(([10, 0, 0, 9], 1234));
    let operator = tokens.of(AdminRole::Operator);
    let drain = ("POST", "/admin/v1/backends/gpu-1/drain");
    let answer = bench
        .send(call_of(drain, Some(&operator), Some(from)))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let index = answer.json()["index"].clone();
    let viewer = tokens.of(AdminRole::Viewer);
    let refused = ("DELETE", "/admin/v1/users/ada?x=1");
    bench
        .send(call_of(refused, Some(&viewer), Some(from)))
        .await;
    // Strangers and reads leave no record.
    bench.send(call_of(drain, None, Some(from))).await;
    bench
        .send(call_of(drain, Some("Bearer x"), Some(from)))
        .await;
    let read = ("GET", "/admin/v1/audit");
    let audit = bench
        .send(call_of(read, Some(&viewer), Some(from)))
        .await
        .json();
    let mut calls = audit["calls"].as_array().unwrap().clone();
    for call in &mut calls {
        let at_ms = call.as_object_mut().unwrap().remove("at_ms");
        assert!(at_ms.unwrap().as_u64().unwrap() > 0);
    }
    let expected = [
        json!({
            "who": "a-viewer", "role": "viewer", "by": "token", "from": "10.0.0.9", "method": "DELETE",
            "path": "/admin/v1/users/ada?x=1", "status": 403, "index": null
        }),
        json!({
            "who": "a-operator", "role": "operator", "by": "token", "from": "10.0.0.9", "method": "POST",
            "path": "/admin/v1/backends/gpu-1/drain", "status": 200, "index": index
        }),
    ];
    assert_eq!(calls, expected);
    let write = &audit["writes"][0];
    assert_eq!(write["action"], "drain");
    assert_eq!(write["index"], index);
    assert_eq!([&write["who"], &write["from"]], ["a-operator", "10.0.0.9"]);
    // Written before tokens existed, or through another replica.
    assert_eq!(audit["writes"][1].get("who"), None);
}

#[tokio::test]
async fn the_audit_is_bounded() {
    let bench = Bench::new();
    for _ in 0..1100 {
        bench
            .status_for(("POST", "/admin/v1/users/ada/forgive"), None)
            .await;
    }
    let audit = bench.get("/admin/v1/audit?limit=1000").await;
    let calls = audit["calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1000);
    assert_eq!(calls[0]["who"], Value::Null);
}
