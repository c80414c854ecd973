//! Deserializes a `prompt` field: text, token ids, or a batch of either.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Prompt, PromptBatch};

/// Reads a `prompt`: a string, token ids, or an array of either. Takes the first prompt of an array
/// and adds the sizes of the others to `batch`. Returns `None` for `null` and for prompts without
/// text to hash, such as an image to embed.
pub(super) struct CompletionPrompt<'a> {
    pub(super) batch: &'a mut PromptBatch,
}

impl<'de> DeserializeSeed<'de> for CompletionPrompt<'_> {
    type Value = Option<Prompt>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for CompletionPrompt<'_> {
    type Value = Option<Prompt>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, an array of strings, an array of token ids, or an array of those")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Prompt::Text(text.as_bytes().to_vec())))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        skip_map(map).map(|()| None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        match seq.next_element_seed(FirstElement)? {
            None => Ok(None),
            Some(Element::Prompt(first)) => {
                while let Some(FurtherPrompt(size)) = seq.next_element()? {
                    self.batch.bytes += size.bytes;
                    self.batch.ids += size.ids;
                    self.batch.prompts = self.batch.prompts.saturating_add(1);
                }
                Ok(first)
            }
            Some(Element::Token(first)) => {
                let mut tokens = vec![first];
                while let Some(token) = seq.next_element()? {
                    tokens.push(token);
                }
                Ok(Some(Prompt::Tokens(tokens)))
            }
        }
    }
}

fn skip_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<(), A::Error> {
    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

/// Reads the first element of a `prompt` array, which determines the kind of the array.
struct FirstElement;

enum Element {
    Token(u32),
    Prompt(Option<Prompt>),
}

impl<'de> DeserializeSeed<'de> for FirstElement {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FirstElement {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or an array of token ids")
    }

    fn visit_u64<E: Error>(self, token: u64) -> Result<Self::Value, E> {
        u32::try_from(token)
            .map(Element::Token)
            .map_err(|_| E::custom(format_args!("token id {token} is above {}", u32::MAX)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Element::Prompt(Some(Prompt::Text(
            text.as_bytes().to_vec(),
        ))))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        skip_map(map).map(|()| Element::Prompt(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = seq.next_element::<u32>()? {
            tokens.push(token);
        }
        Ok(Element::Prompt(Some(Prompt::Tokens(tokens))))
    }
}

/// Size of a further prompt of a batch. The engine decides whether the prompt is valid.
struct FurtherPrompt(PromptBatch);

impl<'de> Deserialize<'de> for FurtherPrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FurtherPromptVisitor).map(Self)
    }
}

struct FurtherPromptVisitor;

impl<'de> Visitor<'de> for FurtherPromptVisitor {
    type Value = PromptBatch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<PromptBatch, E> {
        Ok(PromptBatch::default())
    }

    fn visit_bool<E>(self, _: bool) -> Result<PromptBatch, E> {
        Ok(PromptBatch::default())
    }

    fn visit_u64<E>(self, _: u64) -> Result<PromptBatch, E> {
        Ok(PromptBatch::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<PromptBatch, E> {
        Ok(PromptBatch::default())
    }

    fn visit_f64<E>(self, _: f64) -> Result<PromptBatch, E> {
        Ok(PromptBatch::default())
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptBatch, E> {
        Ok(PromptBatch {
            bytes: text.len() as u64,
            ids: 0,
            prompts: 0,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PromptBatch, A::Error> {
        skip_map(map).map(|()| PromptBatch::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptBatch, A::Error> {
        let mut batch = PromptBatch::default();
        while seq.next_element::<IgnoredAny>()?.is_some() {
            batch.ids += 1;
        }
        Ok(batch)
    }
}
