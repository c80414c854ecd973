//! Mooncake's traces (kvcache-ai/Mooncake, FAST'25): one JSON object per line with `timestamp` in
//! milliseconds, rounded to three seconds, `input_length` and `output_length` in tokens, and
//! `hash_ids` of the input's blocks of 512 tokens, the last of which may be partial.

use std::time::Duration;

use super::{BLOCK_TOKENS, TraceFormat, TraceRecord, tokens};

pub(super) struct Mooncake;

#[derive(serde::Deserialize)]
struct MooncakeLine {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl TraceFormat for Mooncake {
    fn begins_with(&self, first_line: &str) -> bool {
        first_line.trim_start().starts_with('{')
    }

    fn heading_lines(&self) -> usize {
        0
    }

    fn read(&self, line: &str) -> Result<TraceRecord, String> {
        let line: MooncakeLine = serde_json::from_str(line).map_err(|error| {
            format!(
                "expected {{\"timestamp\": ms, \"input_length\": n, \"output_length\": n, \
                 \"hash_ids\": [n, ..]}}: {error}"
            )
        })?;
        let input_tokens = tokens("input_length", line.input_length)?;
        let blocks = input_tokens.div_ceil(BLOCK_TOKENS) as usize;
        if line.hash_ids.len() != blocks {
            return Err(format!(
                "expected {blocks} hash_ids for input_length {input_tokens}, found {}",
                line.hash_ids.len()
            ));
        }
        Ok(TraceRecord {
            at: Duration::from_millis(line.timestamp),
            user: None,
            input_tokens,
            output_tokens: tokens("output_length", line.output_length)?,
            session: [None, None],
            model: None,
            blocks: Some((line.hash_ids, BLOCK_TOKENS)),
        })
    }

    fn grain(&self) -> Duration {
        Duration::from_secs(3)
    }
}
