//! Writes recordings, line by line.

use std::collections::HashSet;

use super::{BlockId, RecordedRequest, Recording, RecordingHead};

/// Writer of the lines of one file.
#[derive(Debug, Default)]
pub struct RecordingWriter {
    /// Blocks in earlier lines, as they were before `name` gave them ids.
    known: HashSet<u64>,
}

impl RecordingWriter {
    /// Returns the first line of the file.
    #[must_use]
    pub fn head(&self, head: &RecordingHead) -> String {
        line(head)
    }

    /// Returns the line of a request with the blocks `chain`, to which `name` gives ids.
    pub fn line(
        &mut self,
        request: RecordedRequest,
        chain: &[u64],
        name: impl Fn(u64) -> BlockId,
    ) -> String {
        // A known block implies that all blocks before it are known.
        let known = chain.iter().rposition(|block| self.known.contains(block));
        let new = &chain[known.map_or(0, |at| at + 1)..];
        self.known.extend(new);
        line(&RecordedRequest {
            after: known.map(|at| name(chain[at])),
            blocks: new.iter().copied().map(name).collect(),
            ..request
        })
    }

    /// Returns the whole file of a recording.
    #[must_use]
    pub fn whole(mut self, recording: &Recording) -> String {
        let mut text = self.head(&recording.head);
        for request in &recording.requests {
            let chain: Vec<u64> = request.blocks.iter().map(|block| block.0).collect();
            text.push_str(&self.line(request.clone(), &chain, BlockId));
        }
        text
    }
}

fn line(of: &impl serde::Serialize) -> String {
    let mut line = serde_json::to_string(of).expect("lines have string keys only");
    line.push('\n');
    line
}

/// Merges the recordings of several replicas by time.
///
/// # Panics
/// Panics if `recordings` is empty.
#[must_use]
pub fn merge(recordings: Vec<Recording>) -> Recording {
    let mut all = recordings.into_iter();
    let mut merged = all.next().expect("there is a recording to merge");
    for other in all {
        let (head, theirs) = (&mut merged.head, other.head);
        head.from_ms = head.from_ms.min(theirs.from_ms);
        head.until_ms = head.until_ms.max(theirs.until_ms);
        head.replicas.extend(theirs.replicas);
        if head.ended_by != theirs.ended_by {
            head.ended_by = format!("{}, {}", head.ended_by, theirs.ended_by);
        }
        for backend in theirs.backends {
            if !head.backends.iter().any(|known| known.id == backend.id) {
                head.backends.push(backend);
            }
        }
        merged.requests.extend(other.requests);
    }
    merged.head.replicas.sort_unstable();
    merged.head.replicas.dedup();
    merged.requests.sort_by_key(|request| request.at_ms);
    merged
}
