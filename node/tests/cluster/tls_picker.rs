//! TLS of the listener for gateways: admission of gateways, and new certificates and authorities.

use crate::stand_in::{GatewayAnswer, GatewayOptions, GatewayRequest, GatewayTls, StandInGateway};

use super::*;

/// Returns `[tls.picker]` with the certificate of replica 1, for gateways of the same authority.
fn picker_section(certs: &Certs) -> String {
    format!(
        "[tls.picker]\ncert_file = {:?}\nkey_file = {:?}\nclient_ca_file = {:?}\n",
        certs.file("replica-1.crt"),
        certs.file("replica-1.key"),
        certs.file("ca.crt")
    )
}

/// Starts a replica that serves gateways.
async fn picking(dir: &TempDir, engines: &[EngineHandle], certs: &Certs) -> Replica {
    let listen = ListenConfig {
        picker: Some("127.0.0.1:0".parse().unwrap()),
        ..anywhere()
    };
    let bound = BoundSockets::bind(&listen).unwrap();
    let peer = bound.addresses().unwrap().peer.to_string();
    config(1, &[peer], engines, dir.path());
    let replica = Replica::run(extended(dir.path(), 1, &picker_section(certs)), bound);
    Http::new().ready(&[replica.addresses]).await;
    replica
}

/// Returns how a gateway presents a certificate of this folder.
fn shown(certs: &Certs, name: &str) -> GatewayTls {
    GatewayTls::Shown {
        cert_file: certs.file(&format!("{name}.crt")),
        key_file: certs.file(&format!("{name}.key")),
    }
}

fn gateway(at: Addresses, tls: GatewayTls) -> StandInGateway {
    let options = GatewayOptions {
        tls,
        ..GatewayOptions::default()
    };
    StandInGateway::new(&[at.picker.unwrap()], options)
}

/// Sends a completion through a gateway.
async fn ask(gateway: &StandInGateway) -> anyhow::Result<GatewayAnswer> {
    let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 4 });
    let request = GatewayRequest::post("/v1/completions", "ada", &body);
    gateway.send(&request).await
}

/// Sends a completion through a new gateway. Returns whether the gateway was admitted.
async fn is_let_in(at: Addresses, tls: GatewayTls) -> bool {
    match ask(&gateway(at, tls)).await {
        Ok(answer) => {
            assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
            true
        }
        Err(_) => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_must_present_a_required_certificate() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    certs.make(&["client", "envoy"]);
    let stranger = Certs::new(&dir.path().join("stranger"), &["1"]);
    stranger.make(&["client", "eve"]);
    let engines = engines(1).await;
    let replica = picking(&dir, &engines, &certs).await;
    let at = replica.addresses;
    for (tls, expected) in [
        (shown(&stranger, "eve"), false),
        (GatewayTls::Anonymous, false),
        (GatewayTls::Clear, false),
        (shown(&certs, "envoy"), true),
    ] {
        assert_eq!(is_let_in(at, tls.clone()).await, expected, "{tls:?}");
    }
    // Rejected gateways sent no request.
    let page = Http::new().metrics(at.admin).await;
    for (outcome, count) in [("picked", 1), ("left", 0), ("broken", 0), ("answered", 0)] {
        let line = format!("quorate_picker_requests_total{{outcome=\"{outcome}\"}} {count}\n");
        assert!(page.contains(&line), "{line}{page}");
    }
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_gateway_authority_keeps_open_connections() {
    let dir = TempDir::new().unwrap();
    let certs = Certs::new(&dir.path().join("certs"), &["1=127.0.0.1"]);
    certs.make(&["client", "envoy"]);
    let next = Certs::new(&dir.path().join("next"), &["1=127.0.0.1"]);
    next.make(&["client", "envoy"]);
    let engines = engines(1).await;
    let replica = picking(&dir, &engines, &certs).await;
    let at = replica.addresses;
    let picker = at.picker.unwrap();
    let open = gateway(at, shown(&certs, "envoy"));
    assert_eq!(ask(&open).await.unwrap().status, StatusCode::OK);
    assert!(!is_let_in(at, shown(&next, "envoy")).await);

    certs.replace(&next, "replica-1");
    std::fs::copy(next.file("ca.crt"), certs.file("beside")).unwrap();
    std::fs::rename(certs.file("beside"), certs.file("ca.crt")).unwrap();
    let expected = Some(next.shown("replica-1.crt"));
    let is_shown = async || shows(picker, next.client(Some("envoy"))).await == expected;
    until("the new certificate is shown", is_shown).await;
    let is_new = async || is_let_in(at, shown(&next, "envoy")).await;
    until("the new authority's gateway is let in", is_new).await;
    assert!(!is_let_in(at, shown(&certs, "envoy")).await);
    // Its connection was opened with the old certificates.
    assert_eq!(ask(&open).await.unwrap().status, StatusCode::OK);
    replica.leave().await;
}
