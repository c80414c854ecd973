//! Ids of a resumable stream's events, which its client hands to another replica.
//!
//! An id says what a client that has received the event has: how much text, of how many tokens, in
//! which stream. The length and the hash of the text show whether the client has sent all of it back.
//! The cluster signs it for one user and one request, so the counts are those of a router. A client
//! can only claim less than it has, with an earlier id.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use ring::hmac;
use state::ids::{StreamId, UserKey};
use state::prefix::HashSecret;
use subtle::ConstantTimeEq as _;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{ReceivedAnswer, RelayedText};
use crate::proxy::response::answer_usage::AnswerDelta;

/// Maximum length of an id, in bytes.
const ID_BYTES_MAX: usize = 256;
/// Separates the keys of ids from other uses of the cluster's secret.
const KEY_LABEL: &[u8] = b"quorate event id";
/// Length of an id's signature, in bytes: half of an HMAC-SHA-256 (RFC 2104, section 5).
const SIGNATURE_BYTES: usize = 16;
/// Version of the ids' format, their first byte.
const VERSION: u8 = 1;
/// The line that makes a client forget the last id (WHATWG HTML, section 9.2.6).
const NO_ID: &[u8] = b"id:\n";

/// Key that signs the ids of one request's stream.
#[derive(Debug)]
pub(in crate::proxy) struct EventIdKey(hmac::Key);

/// Signature of an id.
pub(in crate::proxy) type EventIdSignature = [u8; SIGNATURE_BYTES];

impl EventIdKey {
    /// Returns the key for a request of `user` with this path and body, without what the client has
    /// received.
    pub(in crate::proxy) fn new(
        secret: &HashSecret,
        user: UserKey,
        (path, body): (&str, &[u8]),
    ) -> Self {
        let cluster = hmac::Key::new(hmac::HMAC_SHA256, secret.key_bytes());
        let mut request = hmac::Context::with_key(&cluster);
        request.update(KEY_LABEL);
        request.update(&user.0.to_le_bytes());
        request.update(&secret.hash(body).to_le_bytes());
        request.update(path.as_bytes());
        Self(hmac::Key::new(hmac::HMAC_SHA256, request.sign().as_ref()))
    }

    fn sign(&self, id: &[u8]) -> EventIdSignature {
        let mut signature = [0; SIGNATURE_BYTES];
        let whole = hmac::sign(&self.0, id);
        signature.copy_from_slice(&whole.as_ref()[..SIGNATURE_BYTES]);
        signature
    }
}

/// What the client of a resumable stream has received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) struct EventId {
    pub(in crate::proxy) stream: StreamId,
    /// Length of the text, in bytes.
    pub(in crate::proxy) text_bytes: u32,
    /// `xxh3_64` of the text.
    pub(in crate::proxy) text_hash: u64,
    /// Whether the event reports the usage of the whole answer.
    is_reported: bool,
    /// Whether the engine sets no maximum for a completion without one.
    pub(in crate::proxy) is_endless: bool,
    pub(in crate::proxy) answer: ReceivedAnswer,
}

/// Flags of an id.
mod flags {
    pub(super) const IS_ENDED: u8 = 1;
    pub(super) const IS_REPORTED: u8 = 2;
    pub(super) const IS_ENDLESS: u8 = 4;
}

impl EventId {
    /// Returns the id as text, signed; `None` if it would be too long.
    fn write(&self, key: &EventIdKey) -> Option<String> {
        let mut bytes = self.bytes()?;
        bytes.extend(key.sign(&bytes));
        let text = URL_SAFE_NO_PAD.encode(bytes);
        (text.len() <= ID_BYTES_MAX).then_some(text)
    }

    /// Whether the id was signed by this `key`.
    pub(in crate::proxy) fn is_signed(
        &self,
        key: &EventIdKey,
        signature: &EventIdSignature,
    ) -> bool {
        let expected = self.bytes().map(|bytes| key.sign(&bytes));
        expected.is_some_and(|expected| expected.ct_eq(signature).into())
    }

    /// Returns what is signed.
    fn bytes(&self) -> Option<Vec<u8>> {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let answer = &self.answer;
        let mut bytes = vec![
            VERSION,
            flag(answer.is_ended, flags::IS_ENDED)
                | flag(self.is_reported, flags::IS_REPORTED)
                | flag(self.is_endless, flags::IS_ENDLESS),
            u8::try_from(answer.created.len()).ok()?,
        ];
        bytes.extend(self.stream.0.to_le_bytes());
        bytes.extend(self.text_hash.to_le_bytes());
        let counts = [self.text_bytes, answer.tokens, answer.kept_tokens];
        for count in counts.into_iter().chain([answer.prompt_tokens]) {
            bytes.extend(count.to_le_bytes());
        }
        bytes.extend_from_slice(&answer.created);
        bytes.extend_from_slice(&answer.id);
        Some(bytes)
    }

    /// Reads an id and its signature, which is not checked yet; `None` if it is none.
    pub(in crate::proxy) fn read(text: &[u8]) -> Option<(Self, EventIdSignature)> {
        if text.len() > ID_BYTES_MAX {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (bytes, signature) = bytes.split_last_chunk::<SIGNATURE_BYTES>()?;
        let (&[VERSION, flags, created_bytes], rest) = bytes.split_first_chunk::<3>()? else {
            return None;
        };
        let (stream, rest) = rest.split_first_chunk::<8>()?;
        let (text_hash, mut rest) = rest.split_first_chunk::<8>()?;
        let mut count = || {
            let (count, behind) = rest.split_first_chunk::<4>()?;
            rest = behind;
            Some(u32::from_le_bytes(*count))
        };
        let [text_bytes, tokens, kept_tokens, prompt_tokens] =
            [count()?, count()?, count()?, count()?];
        let (created, id) = rest.split_at_checked(created_bytes.into())?;
        let is_fine = flags <= flags::IS_ENDED | flags::IS_REPORTED | flags::IS_ENDLESS
            && kept_tokens <= tokens
            && is_json(id)
            && is_json(created);
        let id = is_fine.then(|| Self {
            stream: StreamId(u64::from_le_bytes(*stream)),
            text_bytes,
            text_hash: u64::from_le_bytes(*text_hash),
            is_reported: flags & flags::IS_REPORTED != 0,
            is_endless: flags & flags::IS_ENDLESS != 0,
            answer: ReceivedAnswer {
                tokens,
                kept_tokens,
                prompt_tokens,
                is_ended: flags & flags::IS_ENDED != 0,
                id: id.into(),
                created: created.into(),
            },
        });
        id.map(|id| (id, *signature))
    }

    /// Whether `text` is the one that the client has received.
    pub(in crate::proxy) fn is_of(&self, text: &str) -> bool {
        text.len() == self.text_bytes as usize && xxh3_64(text.as_bytes()) == self.text_hash
    }

    /// Returns the end of a stream whose choice has ended: the usage of the answer to `path` from
    /// `model` if it `wants_usage` and has not got it, and the last event.
    pub(in crate::proxy) fn end(&self, is_chat: bool, model: &str, wants_usage: bool) -> Bytes {
        let mut last = String::new();
        if wants_usage && !self.is_reported {
            let text = |json: &[u8]| String::from_utf8_lossy(json).into_owned();
            let (id, created) = (text(&self.answer.id), text(&self.answer.created));
            let object = match is_chat {
                true => "chat.completion.chunk",
                false => "text_completion",
            };
            let usage = self.answer.usage();
            let (prompt, tokens) = (usage.prompt_tokens, usage.completion_tokens);
            let usage = serde_json::json!({
                "prompt_tokens": prompt,
                "completion_tokens": tokens,
                "total_tokens": prompt + tokens,
            });
            let model = serde_json::Value::from(model);
            last = format!(
                "data: {{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\
                 \"model\":{model},\"choices\":[],\"usage\":{usage}}}\n\n"
            );
        }
        last.push_str("data: [DONE]\n\n");
        last.into()
    }
}

/// Whether bytes are one JSON value. They become a part of events.
fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}

/// Writes the ids of one stream's events.
pub(in crate::proxy) struct EventIds {
    stream: StreamId,
    key: Arc<EventIdKey>,
    is_chat: bool,
    is_endless: bool,
    /// Hash and length of the text so far.
    hash: Box<Xxh3>,
    text_bytes: u32,
    is_reported: bool,
    /// Whether the last event with an id had one that is not empty.
    has_id: bool,
}

impl EventIds {
    /// Creates the ids of a stream whose client has received `text`.
    pub(in crate::proxy) fn behind(
        text: &str,
        (stream, key): (StreamId, Arc<EventIdKey>),
        is_chat: bool,
    ) -> Self {
        let mut ids = Self {
            stream,
            key,
            is_chat,
            is_endless: false,
            hash: Box::new(Xxh3::new()),
            text_bytes: 0,
            is_reported: false,
            // A client that resumes has one.
            has_id: true,
        };
        ids.add(text);
        ids
    }

    /// Notes that the engine sets no maximum for a completion without one.
    pub(in crate::proxy) fn are_endless(&mut self) {
        self.is_endless = true;
    }

    fn add(&mut self, text: &str) {
        self.hash.update(text.as_bytes());
        let bytes = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.text_bytes = self.text_bytes.saturating_add(bytes);
    }

    /// Returns the line that gives an event its id, if any. The event is part of what was `relayed`.
    /// Where the client could not go on, the line is empty once, so that it forgets the last id.
    pub(in crate::proxy) fn line(
        &mut self,
        relayed: &RelayedText,
        event: &AnswerDelta<'_>,
    ) -> Option<Bytes> {
        self.add(event.text.as_deref().unwrap_or_default());
        self.is_reported |= event.has_no_choices && event.usage.is_some();
        match self.id(relayed).and_then(|id| id.write(&self.key)) {
            Some(id) => {
                self.has_id = true;
                Some(format!("id: {id}\n").into())
            }
            None => std::mem::take(&mut self.has_id).then(|| Bytes::from_static(NO_ID)),
        }
    }

    /// Returns the id of the last event that was relayed; `None` if the answer cannot be continued
    /// behind it.
    fn id(&self, relayed: &RelayedText) -> Option<EventId> {
        Some(EventId {
            stream: self.stream,
            text_bytes: self.text_bytes,
            text_hash: self.hash.digest(),
            is_reported: self.is_reported,
            is_endless: self.is_endless,
            answer: relayed.properties(self.is_chat)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proxy::response::answer_usage::inspect;

    fn key(user: u64, body: &str) -> Arc<EventIdKey> {
        let secret = HashSecret::of_number(1);
        let request = ("/v1/chat/completions", body.as_bytes());
        Arc::new(EventIdKey::new(&secret, UserKey(user), request))
    }

    fn ids(events: &[&str]) -> Vec<Option<EventId>> {
        let (mut relayed, mut ids) = (
            RelayedText::new(1000),
            EventIds::behind("", (StreamId(7), key(7, "b")), true),
        );
        let read = |line: Bytes| {
            let line = line.strip_prefix(b"id:")?.strip_suffix(b"\n")?;
            EventId::read(line.trim_ascii()).map(|(id, _)| id)
        };
        let each = events.iter().map(|event| {
            let event = inspect(event.as_bytes());
            relayed.note(&event);
            ids.line(&relayed, &event).and_then(read)
        });
        each.collect()
    }

    const FIRST: &str = r#"{"id":"chatcmpl-1","created":7,"choices":[{"delta":{"role":"assistant","content":"é "}}],"usage":{"prompt_tokens":10,"completion_tokens":2}}"#;

    #[test]
    fn an_id_says_what_its_client_has() {
        let last = r#"{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":3}}"#;
        let found = ids(&[FIRST, last]);
        let [Some(first), Some(last)] = &found[..] else {
            panic!("{found:?}");
        };
        assert!(first.is_of("é ") && !first.is_of("é") && last.is_of("é b"));
        let (before, after) = (&first.answer, &last.answer);
        assert_eq!(
            (before.tokens, after.tokens, after.prompt_tokens),
            (2, 3, 10)
        );
        assert!(!before.is_ended && after.is_ended);
        assert_eq!(
            (&*after.id, &*after.created),
            (&b"\"chatcmpl-1\""[..], &b"7"[..])
        );
        assert_eq!(last.stream, StreamId(7));
    }

    #[test]
    fn an_id_belongs_to_one_user_request_and_cluster() {
        let id = ids(&[FIRST]).pop().flatten().unwrap();
        let signature = key(7, "b").sign(&id.bytes().unwrap());
        assert!(id.is_signed(&key(7, "b"), &signature));
        assert!(!id.is_signed(&key(8, "b"), &signature));
        assert!(!id.is_signed(&key(7, "c"), &signature));
        let (path, body) = ("/v1/completions", b"b".as_slice());
        for (secret, path) in [(1, path), (2, "/v1/chat/completions")] {
            let secret = HashSecret::of_number(secret);
            let other = EventIdKey::new(&secret, UserKey(7), (path, body));
            assert!(!id.is_signed(&other, &signature));
        }
    }

    #[test]
    fn the_end_of_a_stream_has_the_usage_that_was_missing() {
        let ended = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2}}"#;
        let found = ids(&[FIRST, ended, usage]);
        let end = |at: usize, wants| found[at].as_ref().unwrap().end(true, "m", wants);
        let expected = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\
             \"created\":7,\"model\":\"m\",\"choices\":[],\"usage\":\
             {\"prompt_tokens\":10,\"completion_tokens\":2,\"total_tokens\":12}}\n\n\
             data: [DONE]\n\n";
        assert_eq!(end(1, true), expected);
        assert_eq!(end(1, false), "data: [DONE]\n\n");
        assert_eq!(end(2, true), "data: [DONE]\n\n");
    }

    #[test]
    fn output_other_than_text_makes_a_client_forget_its_id() {
        let (mut relayed, mut ids) = (
            RelayedText::new(1000),
            EventIds::behind("", (StreamId(7), key(7, "b")), true),
        );
        let call =
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}"#;
        let lines = [FIRST, call, call].map(|event| {
            let event = inspect(event.as_bytes());
            relayed.note(&event);
            ids.line(&relayed, &event)
        });
        assert!(
            lines[0]
                .as_ref()
                .is_some_and(|line| line.len() > NO_ID.len())
        );
        assert_eq!(lines[1].as_deref(), Some(NO_ID));
        assert_eq!(lines[2], None);
    }

    proptest! {
        #[test]
        fn an_id_round_trips(
            stream: u64,
            text: String,
            counts: [u16; 3],
            flags: [bool; 3],
            created: u64,
        ) {
            let id = EventId {
                stream: StreamId(stream),
                text_bytes: u32::try_from(text.len()).unwrap(),
                text_hash: xxh3_64(text.as_bytes()),
                is_reported: flags[1],
                is_endless: flags[2],
                answer: ReceivedAnswer {
                    tokens: u32::from(counts[0]) + u32::from(counts[1]),
                    kept_tokens: counts[1].into(),
                    prompt_tokens: counts[2].into(),
                    is_ended: flags[0],
                    id: b"\"cmpl-0123456789abcdef0123456789abcdef\"".as_slice().into(),
                    created: created.to_string().into_bytes().into(),
                },
            };
            let key = key(7, "b");
            let written = id.write(&key).unwrap();
            let (read, signature) = EventId::read(written.as_bytes()).unwrap();
            prop_assert_eq!(&read, &id);
            prop_assert!(id.is_of(&text) && read.is_signed(&key, &signature));
        }

        #[test]
        fn a_changed_id_is_not_signed(at: prop::sample::Index, bit in 0..8_u8) {
            let key = key(7, "b");
            let id = ids(&[FIRST]).pop().flatten().unwrap();
            let mut bytes = URL_SAFE_NO_PAD.decode(id.write(&key).unwrap()).unwrap();
            *at.get_mut(&mut bytes) ^= 1 << bit;
            let read = EventId::read(URL_SAFE_NO_PAD.encode(bytes).as_bytes());
            prop_assert!(read.is_none_or(|(id, signature)| !id.is_signed(&key, &signature)));
        }

        #[test]
        fn foreign_ids_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = EventId::read(&bytes);
            let framed = [&[VERSION, 0][..], &bytes].concat();
            let _ = EventId::read(URL_SAFE_NO_PAD.encode(framed).as_bytes());
        }
    }
}
