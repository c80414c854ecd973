//! Reads the fields that may name a session.
//!
//! Engines judge them, so a value of another type names nothing.

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::borrowed::Str;
use crate::sessions::{BodySessionNames, NAME_BYTES_MAX, ProgramNames};

/// Length at which a name is cut, in bytes, so that one that is too long stays so without the rest.
const KEPT_BYTES_MAX: usize = 2 * NAME_BYTES_MAX;

/// Values of the fields that may name a session, as far as the body has been read.
#[derive(Default)]
pub(super) struct SessionFields<'de> {
    xargs: Option<&'de RawValue>,
    cache_key: Option<&'de RawValue>,
}

impl<'de> SessionFields<'de> {
    /// Whether `field` may name a session, so that [`Self::take`] reads it.
    pub(super) fn has(field: &str) -> bool {
        matches!(field, "vllm_xargs" | "prompt_cache_key")
    }

    pub(super) fn take(&mut self, field: &str, value: &'de RawValue) {
        match field {
            "vllm_xargs" => self.xargs = Some(value),
            _ => self.cache_key = Some(value),
        }
    }

    /// Returns the names; `None` without any.
    pub(super) fn names(&self) -> Option<Box<BodySessionNames>> {
        let names = BodySessionNames {
            program: self.xargs.and_then(program),
            cache_key: self.cache_key.and_then(text),
        };
        (names != BodySessionNames::default()).then(|| Box::new(names))
    }
}

/// Returns the names in `agentic_context` of `vllm_xargs`.
fn program(xargs: &RawValue) -> Option<ProgramNames> {
    let [context] = members_of(xargs, ["agentic_context"])?;
    let ids = ["program_id", "parent_program_id", "root_program_id"];
    let [program, parent, root] = members_of(context?, ids)?;
    Some(ProgramNames {
        program: text(program?)?,
        parent: parent.and_then(text),
        root: root.and_then(text),
    })
}

/// Returns the values of the members of `object` with these names, each if present; `None` if it is
/// no object.
fn members_of<'de, const N: usize>(
    object: &'de RawValue,
    names: [&'static str; N],
) -> Option<[Option<&'de RawValue>; N]> {
    let mut json = serde_json::Deserializer::from_str(object.get());
    json.deserialize_map(MembersOf(names)).ok()
}

struct MembersOf<const N: usize>([&'static str; N]);

impl<'de, const N: usize> Visitor<'de> for MembersOf<N> {
    type Value = [Option<&'de RawValue>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = [None; N];
        while let Some(Str(name)) = map.next_key()? {
            match self.0.iter().position(|wanted| *wanted == name) {
                Some(at) => values[at] = Some(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(values)
    }
}

/// Returns the text in `value`, cut at [`KEPT_BYTES_MAX`]; `None` if it is none.
fn text(value: &RawValue) -> Option<String> {
    let mut text: String = serde_json::from_str(value.get()).ok()?;
    text.truncate(text.floor_char_boundary(KEPT_BYTES_MAX));
    text.shrink_to_fit();
    Some(text)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::prompt::{ParsedBody, parse};

    fn parsed(fields: &str) -> ParsedBody {
        let body = format!(r#"{{"model":"m",{fields},"messages":[]}}"#);
        parse("/v1/chat/completions", &Bytes::from(body)).unwrap()
    }

    fn program(names: [Option<&str>; 3]) -> ProgramNames {
        let [program, parent, root] = names.map(|it| it.map(ToOwned::to_owned));
        ProgramNames {
            program: program.unwrap(),
            parent,
            root,
        }
    }

    #[test]
    fn a_body_names_its_session_in_two_places() {
        let names = *parsed(
            r#""prompt_cache_key":"k\u00e9","vllm_xargs":{"a":[{}],"agentic_context":{"task_id":
            "t","program_id":"p","parent_program_id":"o","root_program_id":"r","step_id":7}}"#,
        )
        .session
        .unwrap();
        assert_eq!(names.cache_key.as_deref(), Some("ké"));
        let all = program([Some("p"), Some("o"), Some("r")]);
        assert_eq!(names.program, Some(all));
    }

    #[test]
    fn values_of_other_types_name_nothing_and_reject_nothing() {
        for fields in [
            r#""user":"u""#,
            r#""prompt_cache_key":null"#,
            r#""prompt_cache_key":["k"],"vllm_xargs":"x""#,
            r#""prompt_cache_key":7,"vllm_xargs":{"agentic_context":"p"}"#,
            r#""vllm_xargs":{"agentic_context":{"program_id":5}}"#,
            r#""vllm_xargs":{"agentic_context":{"parent_program_id":"o"}}"#,
            r#""vllm_xargs":{"program_id":"p"}"#,
        ] {
            assert_eq!(parsed(fields).session, None, "{fields}");
        }
        let partial =
            r#""vllm_xargs":{"agentic_context":{"program_id":"p","parent_program_id":5}}"#;
        let names = parsed(partial).session.unwrap();
        assert_eq!(names.program, Some(program([Some("p"), None, None])));
    }

    #[test]
    fn repeated_fields_count_as_the_last_one() {
        let names = parsed(r#""prompt_cache_key":"a","prompt_cache_key":"b""#).session;
        assert_eq!(names.unwrap().cache_key.as_deref(), Some("b"));
        let repeated = r#""vllm_xargs":{"agentic_context":{"program_id":"a","program_id":"b"}}"#;
        let names = parsed(repeated).session.unwrap();
        assert_eq!(names.program, Some(program([Some("b"), None, None])));
    }

    #[test]
    fn of_a_name_that_is_too_long_no_more_is_kept_than_shows_it() {
        let long = "é".repeat(1 << 20);
        let names = parsed(&format!(r#""prompt_cache_key":"{long}""#)).session;
        let kept = names.unwrap().cache_key.unwrap();
        assert!(kept.len() > NAME_BYTES_MAX && kept.capacity() <= KEPT_BYTES_MAX);
    }

    #[test]
    fn fields_that_name_sessions_can_still_be_refused_by_the_config() {
        let further = parsed(r#""vllm_xargs":{},"prompt_cache_key":"k""#).further;
        for name in ["vllm_xargs", "prompt_cache_key"] {
            assert!(further.may_have(&[crate::prompt::name_hash(name)]));
            assert!(!crate::prompt::is_read(name));
        }
    }
}
