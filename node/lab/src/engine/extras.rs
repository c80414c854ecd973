//! Request fields that the routing parser ignores, but the engine needs.

use super::rejection::{RequestRejection, read};
use super::transfer::TransferParams;

#[derive(Debug, serde::Deserialize)]
struct ExtraFields {
    kv_transfer_params: Option<TransferParams>,
    n: Option<i64>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    max_output_tokens: Option<i64>,
}

/// Parses the extra fields and rejects unsupported values. Returns the client's token limit and the
/// transfer parameters.
pub(super) fn check_extras(body: &[u8]) -> Result<(Option<u32>, TransferParams), RequestRejection> {
    let extras: ExtraFields = read(body, None)?;
    if extras.n.is_some_and(|n| n != 1) {
        return Err(RequestRejection::bad_request(
            "this engine makes one choice: n must be 1",
            Some("n"),
        ));
    }
    let transfer = extras.kv_transfer_params.unwrap_or_default();
    let Some(wanted) = extras
        .max_completion_tokens
        .or(extras.max_tokens)
        .or(extras.max_output_tokens)
    else {
        return Ok((None, transfer));
    };
    let whole = u32::try_from(wanted).ok().filter(|wanted| *wanted > 0);
    whole.map(|whole| (Some(whole), transfer)).ok_or_else(|| {
        let message = format!("max_tokens must be at least 1, got {wanted}.");
        RequestRejection::bad_request(message, Some("max_tokens"))
    })
}
