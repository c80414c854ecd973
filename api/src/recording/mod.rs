//! Recordings: what replicas were asked, without what was said.
//!
//! A recording is a file of JSON lines. The first is its head, each other one a request: when it
//! came, whose it was, how long it was, which blocks its prompt has, what was decided and what the
//! engine reported. Users, cache groups and blocks are hashes under a secret of the cluster and the
//! recording's salt (`names`), so that nobody can guess a name or a text, and recordings with
//! different salts cannot be compared. Blocks keep the property that matters: equal prefixes have
//! equal ids (I126, ADR 0096).
//!
//! A block names the whole prompt up to its end, so a line has only those blocks that no line before
//! it has, and in `after` the one that they follow. docs/guide/what-if.md describes the file.

mod names;
mod read;
mod write;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

pub use names::RecordingNames;
pub use read::{RecordingError, read};
pub use write::{RecordingWriter, merge};

/// Version of the file. Fields are added without a new one.
pub const FORMAT: u32 = 1;

/// A recording, read.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// What it is of.
    pub head: RecordingHead,
    /// The requests, in the order of the file.
    pub requests: Vec<RecordedRequest>,
}

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordingHead {
    /// [`FORMAT`].
    pub quorate_recording: u32,
    /// The replicas whose requests it has.
    pub replicas: Vec<u8>,
    /// What was hashed with all names. No secret.
    pub salt: String,
    /// When it began, in Unix milliseconds.
    pub from_ms: u64,
    /// When it ended.
    pub until_ms: u64,
    /// What ended it: `seconds`, `requests`, `bytes`, `stopped`; `running`, `decisions` when it was
    /// made of the last decisions.
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
    /// Its id.
    pub id: String,
    /// Models that it serves; `*`: all that it lists.
    pub models: Vec<String>,
    /// Blocks that its cache holds; `None`: unknown.
    #[serde(default)]
    pub capacity_blocks: Option<u32>,
    /// Requests that it gets at once; `None`: as many as come.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedRequest {
    /// When it was understood, in Unix milliseconds by the clock of its replica.
    pub at_ms: u64,
    /// The replica that took it.
    pub replica: u8,
    /// Whose it was, hashed.
    pub user: String,
    /// Who shares cached blocks with that user, hashed; `None`: all who share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The model.
    pub model: String,
    /// What the blocks are made of: `characters` or `tokens`.
    pub unit: String,
    /// Prompt tokens, as far as they were known.
    pub tokens: u32,
    /// Tokens of one block, estimated where blocks are of characters.
    pub block_tokens: u32,
    /// Blocks that an engine could have cached.
    pub matchable: u32,
    /// Whether the answer was asked for as a stream.
    pub stream: bool,
    /// Most output tokens that it asked for.
    #[serde(default)]
    pub tokens_max: Option<u32>,
    /// Its priority.
    #[serde(default)]
    pub priority: i16,
    /// In the file: the block that `blocks` follow; `None`: they begin the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<BlockId>,
    /// In the file: the blocks that no line before has. Once read: all of the prompt.
    #[serde(default)]
    pub blocks: Vec<BlockId>,
    /// What was decided, and what came of it.
    #[serde(default)]
    pub attempts: Vec<RecordedAttempt>,
    /// How it ended; `None`: it was under way.
    #[serde(default)]
    pub end: Option<RecordedEnd>,
}

/// One attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedAttempt {
    /// From when the request was understood to the dispatch.
    pub after_ms: f64,
    /// Of that, waiting for its turn and a backend.
    pub waited_ms: f64,
    /// Applied index of the decision.
    pub index: u64,
    /// The policy that decided.
    pub policy: String,
    /// Backends that passed the filters.
    pub candidates: u32,
    /// The chosen one.
    pub backend: String,
    /// Blocks that it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: String,
    /// Status of the engine's answer.
    #[serde(default)]
    pub status: Option<u16>,
    /// What the engine reported; `None`: it has not ended.
    #[serde(default)]
    pub report: Option<RecordedReport>,
}

/// What an attempt came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedReport {
    /// How it ended, as decisions name it.
    pub end: String,
    /// Prompt tokens that the engine counted; `None`: it told none.
    #[serde(default)]
    pub prompt_tokens: Option<u64>,
    /// Of these, found in its cache; `None`: it did not tell.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
    /// Output tokens, reported or counted.
    pub output_tokens: u64,
    /// From the dispatch to the first byte of the answer.
    #[serde(default)]
    pub ttft_ms: Option<f64>,
    /// From the dispatch to the end.
    pub duration_ms: f64,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedEnd {
    /// As `quorate_proxy_requests_total` counts it.
    pub outcome: String,
    /// Status that its client was told; `None`: it left before.
    #[serde(default)]
    pub status: Option<u16>,
    /// From when it was understood.
    pub after_ms: f64,
}

/// A block of a prompt together with all before it: 16 hex digits.
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
    /// The attempt whose answer the client got, or the last one.
    #[must_use]
    pub fn last(&self) -> Option<&RecordedAttempt> {
        self.attempts.last()
    }

    /// What the engine of the last attempt told.
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

    /// A file of requests with these blocks.
    fn file(chains: &[&[u64]]) -> String {
        let mut writer = RecordingWriter::default();
        let mut text = writer.head(&head());
        for (at, chain) in (1_000..).zip(chains) {
            text += &writer.line(request(at), chain, BlockId);
        }
        text
    }

    #[test]
    fn blocks_are_written_once_and_read_whole() {
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
    fn recordings_of_replicas_are_merged_by_time() {
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
    fn a_bad_file_gives_the_place_and_the_reason() {
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
    fn names_follow_from_the_secret_and_the_salt() {
        let hashing = |secret| BlockHasher {
            seed: 7,
            secret: Some(HashSecret::of_number(secret)),
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
