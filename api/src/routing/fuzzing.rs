//! What routing reads of a request's head, as [`crate::fuzzing`] has it.

use http::HeaderMap;
use state::policy::SessionNames;

use super::session;

/// The session that a request names.
pub(crate) fn session(headers: &HeaderMap) {
    for cookie in [None, Some("quorate-session")] {
        let names = SessionNames {
            header: "x-quorate-session",
            cookie,
        };
        session::hash(names, headers);
    }
}
