//! Problems that several handlers answer.

use http::StatusCode;

use crate::error::Problem;

/// A request that cannot be right, with the field at fault.
pub(super) fn invalid(field: &str, detail: impl Into<String>) -> Problem {
    Problem::new(
        StatusCode::BAD_REQUEST,
        "invalid",
        "the request is not valid",
    )
    .detail(format!("{field}: {}", detail.into()))
    .member("field", field)
}

/// A body of another type than the path takes.
pub(super) fn not_of_type(found: &str, expected: &str) -> Problem {
    Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "content-type",
        "the path does not take a body of this type",
    )
    .detail(format!("content-type: {found:?}, expected {expected}"))
    .member("field", "content-type")
}

/// Something that is not there.
pub(super) fn not_found(what: impl Into<String>) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "not-found", "not found").detail(what)
}
