//! Flags and counts as the engines' Python reads them.
//!
//! vLLM and SGLang check bodies with pydantic in its lax mode: `"stream": 1`, `"stream": "true"`
//! and `"max_tokens": 256.0` are all served. Clients send them, so none may be refused here. What
//! cannot be read that way either is the engine's to refuse, in its own words.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Any JSON value, as far as a flag or a count can be seen in it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Lax {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    /// An array or an object.
    Compound,
}

/// What is longer is neither a flag nor a count.
const TEXT_BYTES_MAX: usize = 32;

/// A value that is neither null nor of the wanted kind: only an engine can judge it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unclear;

impl Lax {
    /// `None` for null.
    pub(super) fn flag(&self) -> Result<Option<bool>, Unclear> {
        match self {
            Self::Null => Ok(None),
            Self::Bool(flag) => Ok(Some(*flag)),
            Self::Number(0.0) => Ok(Some(false)),
            Self::Number(1.0) => Ok(Some(true)),
            Self::Text(text) => match text.to_ascii_lowercase().as_str() {
                "0" | "off" | "f" | "false" | "n" | "no" => Ok(Some(false)),
                "1" | "on" | "t" | "true" | "y" | "yes" => Ok(Some(true)),
                _ => Err(Unclear),
            },
            Self::Number(_) | Self::Compound => Err(Unclear),
        }
    }

    /// `None` for null; what is beyond a `u32` is as good as its maximum.
    pub(super) fn count(&self) -> Result<Option<u32>, Unclear> {
        let number = match self {
            Self::Null => return Ok(None),
            Self::Bool(flag) => f64::from(u8::from(*flag)),
            Self::Number(number) => *number,
            Self::Text(text) => text.trim().parse().map_err(|_| Unclear)?,
            Self::Compound => return Err(Unclear),
        };
        let is_count = number.is_finite() && number >= 0.0 && number.fract() == 0.0;
        // The cast saturates.
        is_count.then_some(Some(number as u32)).ok_or(Unclear)
    }
}

impl<'de> Deserialize<'de> for Lax {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LaxVisitor)
    }
}

struct LaxVisitor;

impl<'de> Visitor<'de> for LaxVisitor {
    type Value = Lax;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Lax, E> {
        Ok(Lax::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Lax, E> {
        Ok(Lax::Bool(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Lax, E> {
        Ok(Lax::Number(number as f64))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Lax, E> {
        Ok(Lax::Number(number as f64))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Lax, E> {
        Ok(Lax::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Lax, E> {
        Ok(if text.len() > TEXT_BYTES_MAX {
            Lax::Compound
        } else {
            Lax::Text(text.to_owned())
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Lax, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Lax::Compound)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Lax, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Lax::Compound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Lax {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn flags_are_read_as_pydantic_reads_them() {
        for json in ["true", "1", "1.0", "\"true\"", "\"Yes\"", "\"1\""] {
            assert_eq!(read(json).flag(), Ok(Some(true)), "{json}");
        }
        for json in ["false", "0", "-0.0", "\"False\"", "\"off\"", "\"0\""] {
            assert_eq!(read(json).flag(), Ok(Some(false)), "{json}");
        }
        assert_eq!(read("null").flag(), Ok(None));
        for json in ["2", "-1", "0.5", "\"\"", "\"maybe\"", "[]", "{\"a\":[1]}"] {
            assert_eq!(read(json).flag(), Err(Unclear), "{json}");
        }
    }

    #[test]
    fn counts_are_read_as_pydantic_reads_them() {
        for (json, count) in [
            ("3", 3),
            ("3.0", 3),
            ("\"3\"", 3),
            ("true", 1),
            ("0", 0),
            ("1e30", u32::MAX),
        ] {
            assert_eq!(read(json).count(), Ok(Some(count)), "{json}");
        }
        assert_eq!(read("null").count(), Ok(None));
        let long = format!("\"{}\"", "1".repeat(TEXT_BYTES_MAX + 1));
        for json in ["-1", "1.5", "\"x\"", "\"nan\"", "[3]", "{}", &long] {
            assert_eq!(read(json).count(), Err(Unclear), "{json}");
        }
    }
}
