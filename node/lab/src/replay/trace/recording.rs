//! Quorate's own recordings (`api::files::recording`): times, users, sessions, models, lengths, and
//! hashes of blocks. Text behind a prompt's last block is always new.

use std::time::Duration;

use super::{LengthScale, TraceRecord, shown, tokens};
use crate::recorded::{output, prompt_tokens, usual_output};

/// Returns whether a file with this first line is a recording.
pub(super) fn begins_with(first_line: &str) -> bool {
    first_line.starts_with("{\"quorate_recording\"")
}

/// Reads all requests of a recording.
///
/// # Errors
/// The number of the first invalid line, counted from 1, and what is wrong with it.
pub(super) fn records(text: &str, scale: LengthScale) -> Result<Vec<TraceRecord>, (usize, String)> {
    let recording =
        api::files::recording::read(text).map_err(|error| (error.line, error.message))?;
    let requests: Vec<_> = recording.requests.iter().collect();
    let lines = (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.trim().is_empty());
    let lines: Vec<usize> = lines.map(|(number, _)| number).skip(1).collect();
    let usual = usual_output(&requests);
    let record = |(number, request): (usize, &&api::files::recording::RecordedRequest)| {
        let in_line = |message| (lines[number], message);
        let names = [
            Some(&request.user),
            request.session.as_ref(),
            request.parent_session.as_ref(),
        ];
        for name in names.into_iter().flatten() {
            let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
            if !is_name {
                return Err(in_line(format!(
                    "expected an id without blanks, found {}",
                    shown(name)
                )));
            }
        }
        let block_tokens = request.block_tokens.max(1);
        scale.keeps_whole(block_tokens).map_err(in_line)?;
        let length = prompt_tokens(request, block_tokens);
        let output = output(request).unwrap_or(usual);
        let mut blocks: Vec<u64> = request.blocks.iter().map(|block| block.0).collect();
        // Ids of blocks are hashes, so they are not among the highest numbers.
        blocks.push(u64::MAX - number as u64);
        Ok(TraceRecord {
            at: Duration::from_millis(request.at_ms),
            user: Some(request.user.clone()),
            session: [&request.session, &request.parent_session].map(Clone::clone),
            model: Some(request.model.clone()),
            input_tokens: tokens("prompt tokens", length.into()).map_err(in_line)?,
            output_tokens: tokens("output_tokens", output.into()).map_err(in_line)?,
            blocks: Some((blocks, block_tokens)),
        })
    };
    requests.iter().enumerate().map(record).collect()
}
