//! What becomes of an event of a stream on its way to the client.

use std::ops::Range;

use bytes::Bytes;

use super::edits::Edit;
use super::event_scan::unmarked;

/// The last chunk of a choice. Its usage is the final one unless a separate usage chunk follows.
#[derive(Debug)]
pub(super) struct LastChunk {
    pub(super) event: Bytes,
    /// Position of the `usage` member in the event.
    pub(super) usage: Range<usize>,
}

impl LastChunk {
    /// Returns the chunk without its usage, because a separate usage chunk follows.
    pub(super) fn without_usage(&self) -> Bytes {
        let (before, after) = (
            &self.event[..self.usage.start],
            &self.event[self.usage.end..],
        );
        [before, after].concat().into()
    }
}

/// Action for an event.
pub(super) enum EventAction {
    /// Relay the event unchanged.
    Kept,
    /// Remove these bytes of the event.
    Cut(Range<usize>),
    /// Hold the event back, see [`LastChunk`]. The range is the position of its `usage`.
    Waits(Range<usize>),
    /// Hold the event back with all that follows, because it reports an error.
    Fails,
}

/// Line that an observer adds to an event: its id, if any.
pub(in crate::proxy) trait EventLine {
    /// Returns the line, with its end.
    fn line(self) -> Option<Bytes>;
}

impl EventLine for () {
    fn line(self) -> Option<Bytes> {
        None
    }
}

impl EventLine for Option<Bytes> {
    fn line(self) -> Option<Bytes> {
        self
    }
}

/// What to do with an event.
pub(super) struct JudgedEvent {
    pub(super) action: EventAction,
    /// Held chunk that precedes it.
    pub(super) before: Option<Bytes>,
    /// Line to add to the event.
    pub(super) line: Option<Bytes>,
}

impl JudgedEvent {
    pub(super) fn new(action: EventAction, before: Option<Bytes>) -> Self {
        Self {
            action,
            before,
            line: None,
        }
    }

    /// Adds the edits of the `event` in `bytes`. Returns the event if it waits for the next one.
    pub(super) fn edit(
        self,
        bytes: &Bytes,
        event: Range<usize>,
        edits: &mut Vec<Edit>,
    ) -> Option<LastChunk> {
        let start = event.start;
        edits.extend(self.before.map(|by| Edit::insert(start, by)));
        let line_edit = |by| Edit::insert(start + mark_bytes(&bytes[event.clone()]), by);
        match self.action {
            EventAction::Kept | EventAction::Fails => edits.extend(self.line.map(line_edit)),
            EventAction::Cut(cut) => {
                let is_whole = cut.len() == event.len();
                edits.extend(self.line.filter(|_| !is_whole).map(line_edit));
                edits.push(Edit::cut(start + cut.start..start + cut.end));
            }
            EventAction::Waits(usage) => {
                let line = self.line.unwrap_or_default();
                let usage = usage.start + line.len()..usage.end + line.len();
                let event_bytes = bytes.slice(event.clone());
                edits.push(Edit::cut(event));
                return Some(LastChunk {
                    event: match line.is_empty() {
                        true => event_bytes,
                        false => [line, event_bytes].concat().into(),
                    },
                    usage,
                });
            }
        }
        None
    }
}

/// Returns the length of the byte order mark at the start of an event, which must stay there.
fn mark_bytes(event: &[u8]) -> usize {
    event.len() - unmarked(event).len()
}
