//! Problems that several handlers return.

use http::StatusCode;

use api::base::printable::escaped;
use api::error::Problem;
use api::settings::SettingError;

/// Returns the problem for an invalid request, which names the field at fault.
pub(super) fn invalid(field: &str, detail: impl Into<String>) -> Problem {
    Problem::new(
        StatusCode::BAD_REQUEST,
        "invalid",
        "the request is not valid",
    )
    .detail(format!("{field}: {}", detail.into()))
    .member("field", field)
}

/// Returns the problem for invalid settings, which lists every fault.
pub(super) fn unfit(faults: &[SettingError]) -> Problem {
    let key = |fault: &SettingError| match fault.key.as_str() {
        "" => "body".to_owned(),
        key => escaped(key).into_owned(),
    };
    let each = faults.iter().map(|fault| {
        let (found, expected) = (escaped(&fault.found), &fault.expected);
        format!("{} is {found} (expected {expected})", key(fault))
    });
    let field = faults.first().map_or("body".to_owned(), key);
    Problem::new(
        StatusCode::BAD_REQUEST,
        "invalid",
        "the request is not valid",
    )
    .detail(each.collect::<Vec<_>>().join("; "))
    .member("field", field)
}

/// Returns the problem for a body whose content type is not `expected`.
pub(super) fn not_of_type(found: &str, expected: &str) -> Problem {
    Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "content-type",
        "the path does not accept a body of this type",
    )
    .detail(format!("content-type: {found:?}, expected {expected}"))
    .member("field", "content-type")
}

/// Returns the problem for work that was given up because the replica stops.
pub(super) fn stopping() -> Problem {
    let title = "the replica is stopping";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", title).retry_after(1)
}

/// Returns the problem for an object that does not exist.
pub(super) fn not_found(what: impl Into<String>) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "not-found", "not found").detail(what)
}
