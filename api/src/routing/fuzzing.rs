//! What routing reads of a request's head, as [`crate::fuzzing`] has it.

use http::HeaderMap;
use state::policy::SessionSettings;

use super::session;

/// The session that a request names.
pub(crate) fn session(headers: &HeaderMap) {
    for cookie in [None, Some("quorate-session".to_owned())] {
        let settings = SessionSettings {
            cookie,
            ..SessionSettings::default()
        };
        session::hash(&settings, headers);
    }
}
