//! Leaves Claude Code's attribution out of prompts, as engines do.
//!
//! Claude Code begins the system text of `/v1/messages` with a block
//! `x-anthropic-billing-header: ...; cch=...;`, which changes with every request. vLLM drops such
//! text blocks of `system` and of messages with the role `system` before it renders the prompt, so
//! they are no part of a prompt's identity: all later blocks would differ in every turn. Of a
//! string, the first line is left out: what follows it is the client's own system text. An engine
//! that keeps the attribution has nothing of such a prompt cached, whatever its identity.

use std::ops::Range;

/// Beginning of a text that Claude Code adds for its provider.
const ATTRIBUTION: &str = "x-anthropic-billing-header";

/// Whether a text block is Claude Code's attribution.
pub(super) fn is_attribution(block: &str) -> bool {
    block.starts_with(ATTRIBUTION)
}

/// Returns a text without the line of Claude Code's attribution, if it begins with one.
pub(super) fn without_attribution(text: &str) -> &str {
    match is_attribution(text) {
        true => text.split_once('\n').map_or("", |(_, rest)| rest),
        false => text,
    }
}

/// Flattened content, and where attributions are in it. Only system text loses them, and the role
/// of a message may follow its content.
#[derive(Default)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Ranges of `bytes`, in order.
    attributions: Vec<Range<usize>>,
}

/// A position in a [`Content`], to which it can be cut back.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    bytes: usize,
    attributions: usize,
}

impl Content {
    pub(super) fn mark(&self) -> Mark {
        Mark {
            bytes: self.bytes.len(),
            attributions: self.attributions.len(),
        }
    }

    pub(super) fn cut_to(&mut self, mark: Mark) {
        self.bytes.truncate(mark.bytes);
        self.attributions.truncate(mark.attributions);
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.attributions.clear();
    }

    /// Appends a string that is the whole content.
    pub(super) fn push_text(&mut self, text: &str) {
        let start = self.bytes.len();
        let length = text.len() - without_attribution(text).len();
        if length > 0 {
            self.attributions.push(start..start + length);
        }
        self.bytes.extend_from_slice(text.as_bytes());
    }

    /// Ends the text block that began at `mark`.
    pub(super) fn end_block(&mut self, mark: Mark) {
        self.attributions.truncate(mark.attributions);
        if self.bytes[mark.bytes..].starts_with(ATTRIBUTION.as_bytes()) {
            self.attributions.push(mark.bytes..self.bytes.len());
        }
    }

    /// Removes the attributions. Returns whether nothing else was there.
    pub(super) fn drop_attributions(&mut self) -> bool {
        let had_some = !self.attributions.is_empty();
        for range in self.attributions.drain(..).rev() {
            self.bytes.drain(range);
        }
        had_some && self.bytes.is_empty()
    }
}
