//! Parses recordings, which are untrusted input.

use std::collections::HashMap;

use serde::de::DeserializeOwned;

use super::{BlockId, FORMAT, RecordedRequest, Recording, RecordingHead};

/// Maximum number of prompt tokens of a request. A higher number means a damaged line.
const TOKENS_MAX: u32 = 1 << 24;
/// Maximum number of blocks in all prompts of a file. Shared blocks count for each prompt.
const BLOCKS_MAX: usize = 1 << 27;

/// Error in a recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct RecordingError {
    /// Number of the line, from 1.
    pub line: usize,
    /// What was found and what was expected.
    pub message: String,
}

/// Block before each block; `None` before the first of a prompt.
type BlocksBefore = HashMap<BlockId, Option<BlockId>>;

/// Parses a whole file.
///
/// # Errors
/// Returns [`RecordingError`] with the first invalid line.
pub fn read(text: &str) -> Result<Recording, RecordingError> {
    let at = |line| move |message| RecordingError { line, message };
    let mut lines = (1..).zip(text.lines());
    let first = lines.next().map_or("", |(_, line)| line);
    let head: RecordingHead = parse(first, "the head of a recording").map_err(at(1))?;
    if head.quorate_recording != FORMAT {
        let found = head.quorate_recording;
        return Err(at(1)(format!(
            "a recording of format {found}, expected {FORMAT}"
        )));
    }
    let (mut before, mut requests, mut blocks) = (BlocksBefore::new(), Vec::new(), 0);
    for (number, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let request: RecordedRequest = parse(line, "a request").map_err(at(number))?;
        let request = whole(request, &mut before).map_err(at(number))?;
        blocks += request.blocks.len();
        if blocks > BLOCKS_MAX {
            let message = format!("expected at most {BLOCKS_MAX} blocks in all prompts together");
            return Err(at(number)(message));
        }
        requests.push(request);
    }
    Ok(Recording { head, requests })
}

fn parse<T: DeserializeOwned>(line: &str, what: &str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| {
        let text = error.to_string();
        // The error contains the line number anyway, and each parsed text has only one line.
        let text = text.replace(" at line 1 column ", " at column ");
        format!("expected {what}: {text}")
    })
}

/// Checks a request and prepends the blocks that earlier lines have.
fn whole(
    mut request: RecordedRequest,
    before: &mut BlocksBefore,
) -> Result<RecordedRequest, String> {
    for (name, found) in [
        ("tokens", request.tokens),
        ("block_tokens", request.block_tokens),
    ] {
        if !(1..=TOKENS_MAX).contains(&found) && (name, found) != ("tokens", 0) {
            return Err(format!("{name} {found}, expected 1 to {TOKENS_MAX}"));
        }
    }
    let mut last = request.after.take();
    let mut shared = Vec::new();
    if let Some(after) = last {
        shared = up_to(after, before)?;
    }
    for block in &request.blocks {
        if before.insert(*block, last).is_some() {
            return Err(format!(
                "block {:016x} again, expected blocks that no line before has",
                block.0
            ));
        }
        last = Some(*block);
    }
    shared.append(&mut request.blocks);
    request.blocks = shared;
    Ok(request)
}

/// Returns a block with all before it, in order. Fails if no earlier line has it.
fn up_to(block: BlockId, before: &BlocksBefore) -> Result<Vec<BlockId>, String> {
    let mut chain = vec![block];
    let mut next = before.get(&block).copied();
    if next.is_none() {
        return Err(format!("no line before has block {:016x}", block.0));
    }
    while let Some(Some(found)) = next {
        chain.push(found);
        next = before.get(&found).copied();
    }
    chain.reverse();
    Ok(chain)
}
