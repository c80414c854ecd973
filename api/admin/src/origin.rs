//! Rejects requests that a browser may have sent on behalf of another site's page.
//!
//! A page can send requests to any address that its reader's browser reaches. Two attacks are
//! possible. In DNS rebinding, a name of the page's own site resolves to this listener, which shows
//! in `host`. In cross-site request forgery, a form or script of another site sends the request,
//! which shows in `origin`, in `sec-fetch-site`, or in a `content-type` that needs no CORS
//! preflight ([`typed`]). Reads are not checked for forgery, because browsers hide their responses
//! from the other site. Programs other than browsers usually send neither `origin` nor
//! `sec-fetch-site`.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use super::problem::{invalid, not_of_type};
use api::error::Problem;

/// Paths served under any host name, because load balancers use many names and the responses are
/// harmless.
const ANY_NAME: [&str; 2] = ["/livez", "/readyz"];

/// Host names of this listener, in addition to addresses and `localhost`.
#[derive(Debug, Clone, Default)]
pub(super) struct AllowedHosts(Arc<[String]>);

impl AllowedHosts {
    pub(super) fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    fn is_own(&self, authority: &Authority) -> bool {
        let host = authority.host().to_ascii_lowercase();
        let address = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || address.parse::<IpAddr>().is_ok() || self.0.contains(&host)
    }
}

/// Rejects requests that a browser may have sent for a page of another site.
pub(super) async fn own_site(
    State(names): State<AllowedHosts>,
    request: Request,
    next: Next,
) -> Response {
    match check(&names, &request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

fn check(names: &AllowedHosts, request: &Request) -> Result<(), Problem> {
    if ANY_NAME.contains(&request.uri().path()) {
        return Ok(());
    }
    let headers = request.headers();
    let host = asked_as(request)?;
    if let Some(host) = &host
        && !names.is_own(host)
    {
        return Err(Problem::new(
            StatusCode::MISDIRECTED_REQUEST,
            "unknown-host",
            "this listener is not known by this host name",
        )
        .detail(format!(
            "host: {:?}, expected an address, localhost, the host of listen.advertise or one of admin.hosts",
            host.host()
        )));
    }
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    if !is_read && is_of_another_site(headers, host.as_ref()) {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "other-site",
            "requests on behalf of another site are refused",
        ));
    }
    Ok(())
}

/// Returns the host that the request was sent to; `None` if the request names none. Browsers always
/// name one.
fn asked_as(request: &Request) -> Result<Option<Authority>, Problem> {
    let wrong = |found: &str| invalid("host", format!("{found}, expected one host"));
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(wrong("several"));
    }
    let Some(host) = host else {
        // HTTP/2 sends the host in the target.
        return Ok(request.uri().authority().cloned());
    };
    let host: Option<Authority> = host.to_str().ok().and_then(|host| host.parse().ok());
    let host = host.filter(|host| !host.as_str().contains('@'));
    let host = host.ok_or_else(|| wrong("no host"))?;
    match request.uri().authority() {
        Some(target) if *target != host => Err(wrong("another one than the target's")),
        Some(_) | None => Ok(Some(host)),
    }
}

fn is_of_another_site(headers: &HeaderMap, host: Option<&Authority>) -> bool {
    let is_own_page = |origin: &HeaderValue| {
        let origin = origin.to_str().unwrap_or_default();
        let authority = origin
            .split_once("://")
            .map_or("", |(_, authority)| authority);
        host.is_some_and(|host| host.as_str().eq_ignore_ascii_case(authority))
    };
    let is_own_fetch = |site: &HeaderValue| site == "same-origin" || site == "none";
    !headers.get_all(ORIGIN).iter().all(is_own_page)
        || !headers.get_all("sec-fetch-site").iter().all(is_own_fetch)
}

/// Rejects a body whose content type is not `expected`. A page of any site may send the content
/// types of a form without a CORS preflight.
pub(super) fn typed(headers: &HeaderMap, expected: &'static str) -> Result<(), Problem> {
    let found = headers
        .get(CONTENT_TYPE)
        .map_or("", |value| value.to_str().unwrap_or_default());
    let media_type = found.split(';').next().unwrap_or_default().trim();
    if media_type.eq_ignore_ascii_case(expected) {
        Ok(())
    } else {
        Err(not_of_type(found, expected))
    }
}
