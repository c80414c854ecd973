//! Lengths of recorded requests (`api::files::recording`).

use api::files::recording::RecordedRequest;

/// Returns the number of tokens of a prompt, which is at least that of its blocks. For blocks of
/// characters, it exceeds that by less than one block, because other token counts are estimates.
pub(crate) fn prompt_tokens(request: &RecordedRequest, block_tokens: u32) -> u32 {
    let blocks = u32::try_from(request.blocks.len()).unwrap_or(u32::MAX);
    let least = blocks.saturating_mul(block_tokens);
    let told = request.report().and_then(|report| report.prompt_tokens);
    let told = told.and_then(|tokens| u32::try_from(tokens).ok());
    let tokens = told.unwrap_or(request.tokens).max(least).max(1);
    match request.unit.as_str() {
        "tokens" => tokens,
        _ => tokens.min(least.saturating_add(block_tokens - 1)),
    }
}

/// Returns the number of output tokens of a request; `None` if it was not completed.
pub(crate) fn output(request: &RecordedRequest) -> Option<u32> {
    let report = request.report()?;
    let tokens = u32::try_from(report.output_tokens).unwrap_or(u32::MAX);
    (report.end == "finished").then_some(tokens.max(1))
}

/// Returns the median number of output tokens of completed requests, which the other requests get
/// because theirs is unknown.
pub(crate) fn usual_output(requests: &[&RecordedRequest]) -> u32 {
    let mut all: Vec<u32> = requests.iter().filter_map(|it| output(it)).collect();
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(1)
}
