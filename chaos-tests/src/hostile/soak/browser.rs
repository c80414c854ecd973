//! Requests that another site's page makes a browser send to the admin port: DNS rebinding and
//! cross-site requests.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http::header::HeaderName;
use tokio::time::{interval, timeout};

use super::SoakContext;
use super::kinds::ClientKind;
use crate::hostile::client::{self, OutgoingRequest};

const PAUSE: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(5);
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 5);
/// Host name of another site, which resolves to this host.
const OTHER: &str = "x.evil.example:8081";
const OTHER_ORIGIN: &str = "http://x.evil.example:8081";

/// One attack of a page, named after its effect if it works.
struct BrowserAttack {
    name: &'static str,
    method: Method,
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: &'static [u8],
}

/// Returns the attacks of other sites' pages. None of them may succeed.
fn attacks() -> Vec<BrowserAttack> {
    vec![
        BrowserAttack {
            name: "users read by another name",
            method: Method::GET,
            path: "/admin/v1/users",
            headers: &[("host", OTHER), ("sec-fetch-site", "same-origin")],
            body: b"",
        },
        BrowserAttack {
            name: "a write by another name",
            method: Method::PUT,
            path: "/admin/v1/users/browser",
            headers: &[
                ("host", OTHER),
                ("origin", OTHER_ORIGIN),
                ("sec-fetch-site", "same-origin"),
                ("content-type", "application/json"),
            ],
            body: br#"{"weight_milli":1000}"#,
        },
        BrowserAttack {
            name: "a write across sites",
            method: Method::POST,
            path: "/admin/v1/cluster/snapshot",
            headers: &[("origin", OTHER_ORIGIN)],
            body: b"",
        },
        BrowserAttack {
            name: "JSON sent as text",
            method: Method::PUT,
            path: "/admin/v1/users/browser",
            headers: &[("origin", "null"), ("content-type", "text/plain")],
            body: br#"{"weight_milli":1000}"#,
        },
    ]
}

/// Tries every attack on every replica until the phase is over.
pub(super) async fn run(scene: Arc<SoakContext>) {
    let mut ticks = interval(PAUSE);
    let attacks = attacks();
    while scene.unless_over(ticks.tick()).await.is_some() {
        for to in &scene.admin {
            for attack in &attacks {
                scene.book(ClientKind::Browser).asked += 1;
                let asked = timeout(
                    PATIENCE,
                    client::ask(&scene.access, FROM, *to, attack.ask()),
                )
                .await;
                let mut book = scene.book(ClientKind::Browser);
                match asked {
                    Ok(Ok(reply)) if reply.status.is_success() => book.harm(attack.name.to_owned()),
                    Ok(Ok(reply)) => book.count(reply.status.as_str()),
                    Ok(Err(_)) => book.count("broke"),
                    Err(_) => book.count("no answer in 5 s"),
                }
            }
        }
    }
}

impl BrowserAttack {
    fn ask(&self) -> OutgoingRequest {
        let body = Bytes::from_static(self.body);
        let mut ask = OutgoingRequest::post(self.path, "none", body);
        ask.method = self.method.clone();
        ask.headers.clear();
        for (name, value) in self.headers {
            ask.set(HeaderName::from_static(name), value);
        }
        ask
    }
}

#[cfg(test)]
mod tests {
    use http::header::{CONTENT_TYPE, HOST, ORIGIN};

    use super::*;

    #[test]
    fn every_browser_attack_carries_a_foreign_origin() {
        for attack in attacks() {
            let headers = attack.ask().headers;
            let is_foreign = [HOST, ORIGIN].iter().any(|name| headers.contains_key(name));
            assert!(is_foreign, "{}", attack.name);
            assert!(attack.body.is_empty() || headers.contains_key(CONTENT_TYPE));
        }
    }
}
