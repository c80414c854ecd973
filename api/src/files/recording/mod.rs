//! Recordings of requests without the contents of prompts and responses.
//!
//! A recording is a file of JSON lines. The first line is the head. Each other line is a request:
//! its time, user, session, length and blocks, the decisions, and what the engine reported. Users,
//! sessions, cache groups and blocks are hashes under a secret of the cluster and the recording's salt (`names`).
//! Without the secret, nobody can therefore confirm a guessed name or text, or compare recordings
//! with different salts. Blocks keep the property that matters: equal prefixes have equal ids
//! (I126, ADR 0044).
//!
//! A block identifies the whole prompt up to its end. A line therefore contains only the blocks
//! that no earlier line has, and in `after` the block that they follow. docs/guide/what-if.md
//! describes the file.

mod names;
mod read;
mod write;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

pub use names::RecordingNames;
pub use read::{RecordingError, read};
pub use write::{RecordingWriter, merge};

/// Version of the format. New fields do not change it.
pub const FORMAT: u32 = 1;

/// A parsed recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// Description of the recording.
    pub head: RecordingHead,
    /// The requests, in the order of the file.
    pub requests: Vec<RecordedRequest>,
}

/// Head of a recording, which is its first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordingHead {
    /// Version of the format, [`FORMAT`].
    pub quorate_recording: u32,
    /// Ids of the replicas whose requests the recording contains.
    pub replicas: Vec<u8>,
    /// Salt of all hashed names. Not a secret.
    pub salt: String,
    /// Start of the recording, in Unix milliseconds.
    pub from_ms: u64,
    /// End of the recording, in Unix milliseconds.
    pub until_ms: u64,
    /// Reason for the end: `seconds`, `requests`, `bytes` or `stopped`; `running` if it has not
    /// ended; `decisions` if it was made from the latest decisions.
    pub ended_by: String,
    /// The live policy at the time of the download.
    #[serde(default)]
    pub policy: Value,
    /// The backends at the time of the download.
    #[serde(default)]
    pub backends: Vec<RecordedBackend>,
}

/// A backend as it was registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedBackend {
    /// Id of the backend.
    pub id: String,
    /// Models that it serves; `*` for all that it lists.
    pub models: Vec<String>,
    /// Capacity of its cache in blocks; `None` if unknown.
    #[serde(default)]
    pub capacity_blocks: Option<u32>,
    /// Maximum number of concurrent requests; `None` if unlimited.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// A recorded request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedRequest {
    /// Time at which the request was parsed, in Unix milliseconds by the clock of its replica.
    pub at_ms: u64,
    /// Id of the replica that received the request.
    pub replica: u8,
    /// Hash of the user.
    pub user: String,
    /// Hash of the cache scope; `None` for the one that users share by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Hash of the agent's session of which the request is a turn, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Hash of the session that started it; `None` for a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_session: Option<String>,
    /// Requested model.
    pub model: String,
    /// Unit of the blocks: `characters` or `tokens`.
    pub unit: String,
    /// Number of prompt tokens, as far as known.
    pub tokens: u32,
    /// Tokens per block, estimated if blocks consist of characters.
    pub block_tokens: u32,
    /// Number of blocks that an engine could have cached.
    pub matchable: u32,
    /// Whether the response was requested as a stream.
    pub stream: bool,
    /// Requested maximum number of output tokens, if any.
    #[serde(default)]
    pub tokens_max: Option<u32>,
    /// Priority of the request.
    #[serde(default)]
    pub priority: i16,
    /// In the file, the block that `blocks` follow; `None` if they begin the prompt. Always `None`
    /// after parsing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<BlockId>,
    /// All blocks of the prompt after parsing. In the file, only those that no earlier line has.
    #[serde(default)]
    pub blocks: Vec<BlockId>,
    /// Attempts with their decisions and results.
    #[serde(default)]
    pub attempts: Vec<RecordedAttempt>,
    /// End of the request; `None` if it was still in flight.
    #[serde(default)]
    pub end: Option<RecordedEnd>,
}

/// One attempt of a request, with its decision and result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedAttempt {
    /// Time from parsing the request to the dispatch, in milliseconds.
    pub after_ms: f64,
    /// Part of `after_ms` spent waiting for its turn and a backend, in milliseconds.
    pub waited_ms: f64,
    /// Applied index of the decision.
    pub index: u64,
    /// Policy that decided.
    pub policy: String,
    /// Number of backends that passed the filters.
    pub candidates: u32,
    /// Chosen backend.
    pub backend: String,
    /// Number of the prompt's blocks that the backend was believed to hold.
    pub matched: u32,
    /// Reason for the choice.
    pub reason: String,
    /// Status of the engine's response, if any.
    #[serde(default)]
    pub status: Option<u16>,
    /// Result of the attempt; `None` if it has not ended.
    #[serde(default)]
    pub report: Option<RecordedReport>,
}

/// Result of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedReport {
    /// How the attempt ended, named as in decisions.
    pub end: String,
    /// Prompt tokens counted by the engine; `None` if it reported none.
    #[serde(default)]
    pub prompt_tokens: Option<u64>,
    /// Number of prompt tokens found in the engine's cache; `None` if not reported.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
    /// Number of output tokens, reported by the engine or else counted by the router.
    pub output_tokens: u64,
    /// Time from the dispatch to the first output of a stream, in milliseconds; `None` without
    /// output, and if the response was no stream.
    #[serde(default)]
    pub ttft_ms: Option<f64>,
    /// Time from the dispatch to the end of the attempt, in milliseconds.
    pub duration_ms: f64,
}

/// End of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedEnd {
    /// Outcome as counted by `quorate_proxy_requests_total`.
    pub outcome: String,
    /// Status sent to the client; `None` if the client left earlier.
    #[serde(default)]
    pub status: Option<u16>,
    /// Time from parsing the request to its end, in milliseconds.
    pub after_ms: f64,
}

/// Id of a block together with all before it, written as 16 hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u64);

impl Serialize for BlockId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl<'de> Deserialize<'de> for BlockId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = u64::from_str_radix(&text, 16).ok().filter(|_| is_hex);
        let wrong = || serde::de::Error::custom(format!("block {text:?}, expected 16 hex digits"));
        id.map(Self).ok_or_else(wrong)
    }
}

impl RecordedRequest {
    /// Returns the last attempt. If the client got an engine's response, it is from this attempt.
    #[must_use]
    pub fn last(&self) -> Option<&RecordedAttempt> {
        self.attempts.last()
    }

    /// Returns the result of the last attempt; `None` without one.
    #[must_use]
    pub fn report(&self) -> Option<&RecordedReport> {
        self.last()?.report.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use state::ids::BlockHash;
    use state::prefix::{BlockHasher, HashSecret};

    use super::*;

    fn head() -> RecordingHead {
        RecordingHead {
            quorate_recording: FORMAT,
            replicas: vec![1],
            salt: "s".to_owned(),
            from_ms: 1_000,
            until_ms: 2_000,
            ended_by: "seconds".to_owned(),
            policy: Value::Null,
            backends: Vec::new(),
        }
    }

    fn request(at_ms: u64) -> RecordedRequest {
        RecordedRequest {
            at_ms,
            replica: 1,
            user: "00".to_owned(),
            tenant: None,
            session: None,
            parent_session: None,
            model: "m".to_owned(),
            unit: "tokens".to_owned(),
            tokens: 100,
            block_tokens: 16,
            matchable: 6,
            stream: true,
            tokens_max: None,
            priority: 0,
            after: None,
            blocks: Vec::new(),
            attempts: Vec::new(),
            end: None,
        }
    }

    /// Returns a file of requests with these blocks.
    fn file(chains: &[&[u64]]) -> String {
        let mut writer = RecordingWriter::default();
        let mut text = writer.head(&head());
        for (at, chain) in (1_000..).zip(chains) {
            text += &writer.line(request(at), chain, BlockId);
        }
        text
    }

    #[test]
    fn recorded_blocks_are_written_once_and_read_whole() {
        let chains: [&[u64]; 6] = [&[1, 2, 3], &[1, 2, 3, 4], &[1, 5], &[], &[1, 2, 3, 4], &[9]];
        let text = file(&chains);
        let fourth = format!("{:016x}", 4);
        assert_eq!(
            text.matches(&fourth).count(),
            2,
            "named, then referred to: {text}"
        );
        let read = read(&text).unwrap();
        assert_eq!(read.head, head());
        for (request, chain) in read.requests.iter().zip(chains) {
            let ids: Vec<u64> = request.blocks.iter().map(|it| it.0).collect();
            assert_eq!(ids, chain);
            assert_eq!(request.after, None);
        }
    }

    #[test]
    fn recordings_merge_by_time() {
        let one = read(&file(&[&[1, 2], &[1, 2, 3]])).unwrap();
        let mut other = read(&file(&[&[1, 2, 4]])).unwrap();
        other.head.replicas = vec![2];
        other.head.from_ms = 900;
        other.requests[0].at_ms = 1_000;
        let merged = merge(vec![one, other]);
        assert_eq!(
            (&merged.head.replicas[..], merged.head.from_ms),
            (&[1, 2][..], 900)
        );
        let times: Vec<u64> = merged.requests.iter().map(|it| it.at_ms).collect();
        assert_eq!(times, [1_000, 1_000, 1_001]);
        let again = read(&RecordingWriter::default().whole(&merged)).unwrap();
        assert_eq!(again, merged);
    }

    #[test]
    fn a_bad_recording_is_reported_with_place_and_reason() {
        let good = file(&[&[1, 2], &[1, 2, 3]]);
        let line = |number: usize| good.lines().nth(number).unwrap();
        for (text, place, part) in [
            (String::new(), 1, "expected the head of a recording"),
            (
                "{\"timestamp\":1}".to_owned(),
                1,
                "field `quorate_recording`",
            ),
            (
                good.replace("recording\":1", "recording\":2"),
                1,
                "format 2, expected 1",
            ),
            (format!("{}\nno json\n", line(0)), 2, "expected a request"),
            (
                format!("{}\n{}\n", line(0), line(2)),
                2,
                "no line before has block 0000000000000002",
            ),
            (
                format!("{good}{}\n", line(1)),
                4,
                "block 0000000000000001 again",
            ),
            (
                good.replace("\"0000000000000003\"", "\"x\""),
                3,
                "expected 16 hex digits",
            ),
            (
                good.replace("\"block_tokens\":16", "\"block_tokens\":0"),
                2,
                "block_tokens 0",
            ),
            (
                good.replace("\"tokens\":100", "\"tokens\":99999999"),
                2,
                "tokens 99999999",
            ),
            (good[..good.len() - 20].to_owned(), 3, "expected a request"),
        ] {
            let error = read(&text).unwrap_err();
            let told = error.to_string();
            assert_eq!(error.line, place, "{told}");
            assert!(told.contains(part), "{told}");
        }
    }

    #[test]
    fn recorded_names_depend_on_secret_and_salt() {
        let hashing = |secret| BlockHasher {
            seed: 7,
            secret: HashSecret::of_number(secret),
        };
        let names = |secret, salt| RecordingNames::new(&hashing(secret), salt);
        let told = |names: &RecordingNames| (names.user("ada"), names.block(BlockHash(5)));
        assert_eq!(told(&names(1, "s")), told(&names(1, "s")));
        assert_ne!(told(&names(1, "s")), told(&names(1, "t")));
        assert_ne!(told(&names(1, "s")), told(&names(2, "s")));
        let names = names(1, "s");
        assert_ne!(names.user("ada"), names.user("bo"));
        assert_ne!(names.user("ada"), names.tenant("ada"));
        assert_ne!(names.block(BlockHash(5)).0, 5);
    }
}
