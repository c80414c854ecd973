//! Fuzz targets for what routing reads from a request's head; see [`crate::fuzzing`].

use http::HeaderMap;
use state::policy::SessionNames;

use super::session;

/// Reads the session that a request names.
pub(crate) fn session(headers: &HeaderMap) {
    for cookie in [None, Some("quorate-session")] {
        let names = SessionNames {
            header: "x-quorate-session",
            cookie,
        };
        session::hash(names, headers);
    }
}
