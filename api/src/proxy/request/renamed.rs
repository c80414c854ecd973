//! The body of a request whose model has another name at the engines.

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_TYPE;

use super::routes::takes_form;
use crate::error::ProxyError;
use crate::prompt::{ReadError, read_form};
use crate::proxy::settings::reserved_fields::with_field;

/// Returns the body with `model` in place of the model that it names. Nothing else changes. A form
/// without a model stays as it is.
pub(super) fn renamed(
    (path, headers): (&str, &HeaderMap),
    body: &Bytes,
    model: &str,
) -> Result<Bytes, ProxyError> {
    if takes_form(path) {
        let content_type = headers.get(CONTENT_TYPE);
        let content_type = content_type.and_then(|it| it.to_str().ok());
        let form = read_form(content_type.unwrap_or_default(), body).map_err(ReadError::Bad)?;
        let (start, end) = form.model_span;
        if form.model.is_none() {
            return Ok(body.clone());
        }
        return Ok([&body[..start], model.as_bytes(), &body[end..]]
            .concat()
            .into());
    }
    let value = serde_json::to_string(model).expect("texts serialise");
    with_field(body, "model", &value)
}
