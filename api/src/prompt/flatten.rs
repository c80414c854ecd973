//! Flattens chat messages into one run of bytes, on which prefix identity is computed.
//!
//! For every conversation, the flattened prompt of turn n, with the reply appended by
//! [`append_reply`], is a prefix of the flattened prompt of turn n + 1. So no output depends on
//! later input, and no generation prompt ends the text.

use std::borrow::Cow;
use std::fmt;
use std::io::Write;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::Xxh3;

use super::ReplyShape;
use super::attribution::{Content, without_attribution};
use super::borrowed::Str;

/// Appends an assistant's reply to the flattened messages in `text`, exactly as the next turn does.
pub fn append_reply(text: &mut Vec<u8>, reply: &str) {
    ReplyShape::Message.append(text, reply);
}

/// Appends `<|name|>`, a line break, `content` and a line break to `out`.
pub(super) fn push_framed(out: &mut Vec<u8>, name: &str, content: &[u8]) {
    out.extend_from_slice(b"<|");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"|>\n");
    out.extend_from_slice(content);
    out.push(b'\n');
}

/// Flattens the `input` of `/v1/responses`: a string, or an array of messages and other items.
pub(super) struct Input<'a> {
    pub(super) out: &'a mut Vec<u8>,
}

impl<'de> DeserializeSeed<'de> for Input<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Input<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or an array of items")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        push_framed(self.out, "user", text.as_bytes());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        flatten_messages(self.out, false, seq)
    }
}

/// Flattens an array of messages.
pub(super) struct Messages<'a> {
    pub(super) out: &'a mut Vec<u8>,
    /// Whether system messages lose Claude Code's attribution.
    pub(super) drops_attribution: bool,
}

impl<'de> DeserializeSeed<'de> for Messages<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Messages<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        flatten_messages(self.out, self.drops_attribution, seq)
    }
}

fn flatten_messages<'de, A: SeqAccess<'de>>(
    out: &mut Vec<u8>,
    drops_attribution: bool,
    mut seq: A,
) -> Result<(), A::Error> {
    let mut content = Content::default();
    while seq
        .next_element_seed(Message {
            out,
            content: &mut content,
            drops_attribution,
        })?
        .is_some()
    {}
    Ok(())
}

/// Flattens one message, or another item of `/v1/responses` (a function call, its output).
struct Message<'a> {
    out: &'a mut Vec<u8>,
    /// Scratch buffer for the content, which may precede the role.
    content: &'a mut Content,
    drops_attribution: bool,
}

impl<'de> DeserializeSeed<'de> for Message<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Message<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.content.clear();
        let mut text: Option<&'de str> = None;
        let mut role: Option<Str<'de>> = None;
        let mut kind: Option<Str<'de>> = None;
        let mut calls: Option<&'de RawValue> = None;
        let mut rest = OtherFields::default();
        while let Some(Str(key)) = map.next_key()? {
            match &*key {
                "role" => role = Some(map.next_value()?),
                "type" => kind = Some(map.next_value()?),
                "content" => {
                    self.content.clear();
                    text = map.next_value_seed(MessageContent {
                        out: &mut *self.content,
                    })?;
                }
                "tool_calls" | "function_call" => {
                    let raw = map.next_value::<&'de RawValue>()?;
                    calls = (raw.get() != "null").then_some(raw).or(calls);
                }
                // These fields of the same item may change between turns.
                "id" | "status" | "cache_control" => drop(map.next_value::<IgnoredAny>()?),
                _ => rest.push(key, map.next_value()?),
            }
        }
        if self.drops_attribution && matches!(&role, Some(Str(role)) if role == "system") {
            let had_text = text.is_some_and(|text| !text.is_empty());
            text = text.map(without_attribution);
            let is_bare = had_text && text == Some("");
            if is_bare || self.content.drop_attributions() {
                return Ok(());
            }
        }
        if let (Some(Str(role)), Some(text), None) = (&role, text, calls) {
            push_framed(self.out, role, text.as_bytes());
            return Ok(());
        }
        let content = &mut self.content.bytes;
        content.extend_from_slice(text.unwrap_or_default().as_bytes());
        match (role, kind) {
            (Some(Str(role)), _) => {
                let calls = calls.map_or("", RawValue::get);
                content.extend_from_slice(calls.as_bytes());
                push_framed(self.out, &role, content);
            }
            (None, kind) => {
                rest.write_json(content);
                let kind = kind.as_ref().map_or("", |Str(kind)| kind);
                push_framed(self.out, kind, content);
            }
        }
        Ok(())
    }
}

/// Reads the content of a message. Returns a string as a slice of the body, because long strings
/// should be copied only once. Writes anything else to `out`.
struct MessageContent<'a> {
    out: &'a mut Content,
}

impl<'de> DeserializeSeed<'de> for MessageContent<'_> {
    type Value = Option<&'de str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessageContent<'_> {
    type Value = Option<&'de str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let out = &mut Content::default();
        ContentText { out }.expecting(f)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Some(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        self.out.push_text(text);
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        ContentText { out: self.out }.visit_seq(seq)?;
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        ContentText { out: self.out }.visit_map(map)?;
        Ok(None)
    }
}

/// Flattens message content: a string, an array of parts, or `null`. Returns `false` for `null`.
pub(super) struct ContentText<'a> {
    pub(super) out: &'a mut Content,
}

impl<'de> DeserializeSeed<'de> for ContentText<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ContentText<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, an array of content parts, or null")
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_str<E>(self, text: &str) -> Result<bool, E> {
        self.out.push_text(text);
        Ok(true)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        while seq.next_element_seed(Part { out: self.out })?.is_some() {}
        Ok(true)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<bool, A::Error> {
        Part { out: self.out }.visit_map(map)?;
        Ok(true)
    }
}

/// Flattens one content part: text as is, media as a hash, anything else as its JSON.
struct Part<'a> {
    out: &'a mut Content,
}

impl<'de> DeserializeSeed<'de> for Part<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a content part: an object or a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        let mark = self.out.mark();
        self.out.push_text(text);
        self.out.end_block(mark);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mark = self.out.mark();
        let mut has_text = false;
        let mut kind: Option<Str<'de>> = None;
        let mut rest = OtherFields::default();
        while let Some(Str(key)) = map.next_key()? {
            match &*key {
                "type" => kind = Some(map.next_value()?),
                "text" => {
                    self.out.cut_to(mark);
                    has_text = map.next_value_seed(ContentText {
                        out: &mut *self.out,
                    })?;
                }
                // Clients move cache marks from turn to turn; they are not part of the prompt.
                "cache_control" => drop(map.next_value::<IgnoredAny>()?),
                _ => rest.push(key, map.next_value()?),
            }
        }
        let kind = kind.as_ref().map_or("text", |Str(kind)| kind);
        if has_text && matches!(kind, "text" | "input_text" | "output_text") {
            self.out.end_block(mark);
        } else {
            rest.write_part(&mut self.out.bytes, kind);
        }
        Ok(())
    }
}

/// Fields that are not interpreted, as the client sent them.
#[derive(Default)]
struct OtherFields<'de>(Vec<(Cow<'de, str>, &'de RawValue)>);

impl<'de> OtherFields<'de> {
    fn push(&mut self, key: Cow<'de, str>, value: &'de RawValue) {
        self.0.push((key, value));
    }

    fn write_json(&self, out: &mut Vec<u8>) {
        for (key, value) in &self.0 {
            out.extend_from_slice(key.as_bytes());
            out.push(b':');
            out.extend_from_slice(value.get().as_bytes());
            out.push(b',');
        }
    }

    fn write_part(&self, out: &mut Vec<u8>, kind: &str) {
        const MEDIA: [&str; 5] = ["image", "audio", "video", "file", "document"];
        let is_media = MEDIA.iter().any(|media| kind.contains(media));
        if is_media {
            let mut hash = Xxh3::new();
            for (key, value) in &self.0 {
                hash.update(key.as_bytes());
                hash.update(value.get().as_bytes());
            }
            write!(out, "<|{kind}:{:016x}|>", hash.digest()).expect("a vector takes all bytes");
        } else {
            write!(out, "<|{kind}|>").expect("a vector takes all bytes");
            self.write_json(out);
        }
    }
}
