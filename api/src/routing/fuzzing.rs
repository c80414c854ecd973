//! Fuzz targets for the request headers that routing reads; see [`crate::fuzzing`].

use http::HeaderMap;
use state::policy::SessionNames;

use super::decide::session;

/// Reads the session's name from `headers`.
pub(crate) fn session(headers: &HeaderMap) {
    for cookie in [None, Some("quorate-session")] {
        let names = SessionNames {
            header: "x-quorate-session",
            cookie,
            client_address: true,
        };
        let parts = session::SessionParts {
            headers: Some(headers),
            client: None,
        };
        session::hash(names, parts);
    }
}
