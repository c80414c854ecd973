//! Finds the body fields that the router does not read itself.
//!
//! Their names are kept as hashes in a fixed array, so they cost no allocation if unused. Code that
//! uses a field rereads the body with [`members`] only if the name may be present.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use super::borrowed::Str;

/// Maximum number of further fields whose hashes are kept; real requests have about ten.
const KEPT_MAX: usize = 24;
/// Maximum number of fields in a body that [`members`] reads.
pub const MEMBERS_MAX: usize = 4096;

/// Hashed names of the fields of a body that the router does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FurtherFields {
    hashes: [u32; KEPT_MAX],
    count: usize,
}

impl FurtherFields {
    pub(super) fn add(&mut self, name: &str) {
        if let Some(place) = self.hashes.get_mut(self.count) {
            *place = name_hash(name);
        }
        self.count = self.count.saturating_add(1);
    }

    /// Whether a field whose [`name_hash`] is in `names` may be present; `false` is certain.
    #[must_use]
    pub fn may_have(&self, names: &[u32]) -> bool {
        match self.hashes.get(..self.count) {
            Some(kept) => kept.iter().any(|hash| names.contains(hash)),
            None => !names.is_empty(),
        }
    }
}

/// Returns the hash of `name` that [`FurtherFields`] keeps.
#[must_use]
pub fn name_hash(name: &str) -> u32 {
    let [a, b, c, d, ..] = xxh3_64(name.as_bytes()).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// A field of a body's top-level object, and its position in the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyMember<'a> {
    /// Name of the field, unescaped.
    pub name: Cow<'a, str>,
    /// Byte range from the quote before the name to the end of the value.
    pub span: (usize, usize),
    /// Start of the value.
    pub value_at: usize,
}

/// Returns the fields of the top-level object in `text`, in order; `None` if it has more than
/// [`MEMBERS_MAX`] or is no JSON object.
#[must_use]
pub fn members(text: &str) -> Option<Vec<BodyMember<'_>>> {
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(BodyMembers { text }).ok().flatten()
}

struct BodyMembers<'de> {
    text: &'de str,
}

impl<'de> Visitor<'de> for BodyMembers<'de> {
    type Value = Option<Vec<BodyMember<'de>>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        let mut before = self.text.find('{').map_or(0, |brace| brace + 1);
        while let Some(Str(name)) = map.next_key()? {
            let value = map.next_value::<&'de RawValue>()?.get();
            let end = value.as_ptr().addr() - self.text.as_ptr().addr() + value.len();
            // Only white space and a comma separate two members.
            let start = before + self.text[before..].find('"').unwrap_or(0);
            before = end;
            if members.len() < MEMBERS_MAX + 1 {
                let span = (start, end);
                members.push(BodyMember {
                    name,
                    span,
                    value_at: end - value.len(),
                });
            }
        }
        Ok(Some(members).filter(|members| members.len() <= MEMBERS_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_members_are_found_verbatim() {
        let text = "  {\"a\" : {\"b\":[1,\"}\"]} ,\n \"\\u0062\":2,\"a\":\"\\\"\"}  ";
        let found = members(text).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|it| (&*it.name, &text[it.span.0..it.span.1]))
            .collect();
        assert_eq!(
            shown,
            [
                ("a", "\"a\" : {\"b\":[1,\"}\"]}"),
                ("b", "\"\\u0062\":2"),
                ("a", "\"a\":\"\\\"\""),
            ]
        );
        assert_eq!(members("{}"), Some(Vec::new()));
        let many = |count: usize| format!("{{{}\"x\":1}}", "\"x\":1,".repeat(count - 1));
        assert_eq!(members(&many(MEMBERS_MAX)).unwrap().len(), MEMBERS_MAX);
        assert_eq!(members(&many(MEMBERS_MAX + 1)), None);
    }

    #[test]
    fn present_field_names_are_never_missed() {
        let mut further = FurtherFields::default();
        assert!(!further.may_have(&[name_hash("a")]));
        for nth in 0..KEPT_MAX {
            further.add(&nth.to_string());
        }
        assert!(further.may_have(&[name_hash("a"), name_hash("23")]));
        assert!(!further.may_have(&[name_hash("a")]));
        further.add("a");
        assert!(further.may_have(&[name_hash("a")]));
        assert!(!further.may_have(&[]));
    }
}
