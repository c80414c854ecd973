//! Body fields and headers with which a client would control an engine.
//!
//! Engines accept more than prompts: queue priorities, engines to fetch cached blocks from, the
//! data-parallel rank, code that processes the logits. Behind a router, clients must not set these,
//! unless the config allows it. A refused field gets a 400 that names it. A stripped field is
//! removed from the body, and all other bytes stay. Forms are never changed, so there a stripped
//! field is refused too.

use bytes::Bytes;
use http::HeaderName;

use crate::error::ProxyError;
use crate::prompt::{BodyMember, MEMBERS_MAX, ParsedBody, members, name_hash};

/// Default list of refused fields.
pub const REFUSED_FIELDS: [&str; 6] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "custom_logit_processor",
];
/// Default list of stripped fields. Honest clients send them too.
pub const STRIPPED_FIELDS: [&str; 4] = [
    "priority",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
];
/// Default list of stripped headers.
pub const STRIPPED_HEADERS: [&str; 3] = ["x-data-parallel-rank", "x-override-*", "x-vllm-priority"];

/// Rules for fields of request bodies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldRules {
    refused: Vec<String>,
    stripped: Vec<String>,
    /// Hashes of the names in both lists.
    hashes: Vec<u32>,
}

impl Default for FieldRules {
    fn default() -> Self {
        let texts = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        Self::new(texts(&REFUSED_FIELDS), texts(&STRIPPED_FIELDS))
    }
}

impl FieldRules {
    /// Creates rules from names of top-level fields. A name in both lists is refused.
    #[must_use]
    pub fn new(refused: Vec<String>, stripped: Vec<String>) -> Self {
        let names = refused.iter().chain(&stripped);
        let hashes = names.map(|name| name_hash(name)).collect();
        Self {
            refused,
            stripped,
            hashes,
        }
    }

    /// Returns the body without its stripped fields; `None` if nothing changes. Fails on refused
    /// fields.
    pub(in crate::proxy) fn apply(
        &self,
        parsed: &ParsedBody,
        body: &Bytes,
    ) -> Result<Option<Bytes>, ProxyError> {
        if !parsed.further.may_have(&self.hashes) {
            return Ok(None);
        }
        let text = str::from_utf8(body).unwrap_or_default();
        let members = members(text).ok_or_else(too_many)?;
        let is_in =
            |names: &[String], member: &BodyMember<'_>| names.iter().any(|it| *it == member.name);
        if let Some(member) = members.iter().find(|it| is_in(&self.refused, it)) {
            return Err(ProxyError::BadRequest {
                message: format!("{}: is not taken from clients here", member.name),
                param: Some(member.name.to_string()),
            });
        }
        if !members.iter().any(|it| is_in(&self.stripped, it)) {
            return Ok(None);
        }
        Ok(Some(without(text, &members, |it| {
            is_in(&self.stripped, it)
        })))
    }
}

impl FieldRules {
    /// Rejects a form with a refused or stripped field, because forms are forwarded unchanged.
    pub(in crate::proxy) fn check_form(&self, names: &[String]) -> Result<(), ProxyError> {
        let is_ruled = |name: &&String| self.refused.contains(name) || self.stripped.contains(name);
        match names.iter().find(is_ruled) {
            None => Ok(()),
            Some(name) => Err(ProxyError::BadRequest {
                message: format!("{name}: is not taken from clients here"),
                param: Some(name.clone()),
            }),
        }
    }
}

/// Returns the body without the field `name`, if it has it.
pub(in crate::proxy) fn without_field(body: &Bytes, name: &str) -> Result<Bytes, ProxyError> {
    let text = str::from_utf8(body).unwrap_or_default();
    let members = members(text).ok_or_else(too_many)?;
    match members.iter().any(|it| it.name == name) {
        true => Ok(without(text, &members, |it| it.name == name)),
        false => Ok(body.clone()),
    }
}

/// Returns the body with `value`, which is JSON, for the field `name`, wherever it is. A body without
/// the field gets it as its first. Nothing else changes.
pub(in crate::proxy) fn with_field(
    body: &Bytes,
    name: &str,
    value: &str,
) -> Result<Bytes, ProxyError> {
    let text = str::from_utf8(body).unwrap_or_default();
    let members = members(text).ok_or_else(too_many)?;
    let mut out = String::with_capacity(text.len() + name.len() + value.len() + 4);
    let mut before = 0;
    for member in members.iter().filter(|it| it.name == name) {
        out.push_str(&text[before..member.value_at]);
        out.push_str(value);
        before = member.span.1;
    }
    if before == 0 {
        before = text.find('{').map_or(0, |brace| brace + 1);
        let comma = if members.is_empty() { "" } else { "," };
        out = format!("{}\"{name}\":{value}{comma}", &text[..before]);
    }
    out.push_str(&text[before..]);
    Ok(out.into())
}

fn too_many() -> ProxyError {
    ProxyError::BadRequest {
        message: format!("the body has more than {MEMBERS_MAX} fields"),
        param: None,
    }
}

/// Returns `text` without those of its members that `is_out` selects.
fn without(
    text: &str,
    members: &[BodyMember<'_>],
    is_out: impl Fn(&BodyMember<'_>) -> bool,
) -> Bytes {
    let (first, last) = (&members[0], &members[members.len() - 1]);
    let mut out = String::with_capacity(text.len());
    out.push_str(&text[..first.span.0]);
    let (mut is_empty, mut before) = (true, first.span.0);
    for member in members {
        let (start, end) = member.span;
        if !is_out(member) {
            // The first remaining member has no comma before it.
            let from = if is_empty { start } else { before };
            out.push_str(&text[from..end]);
            is_empty = false;
        }
        before = end;
    }
    out.push_str(&text[last.span.1..]);
    out.into()
}

/// Headers that do not reach engines: names, and prefixes of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderRules {
    names: Vec<HeaderName>,
    prefixes: Vec<String>,
}

impl Default for HeaderRules {
    fn default() -> Self {
        let patterns = STRIPPED_HEADERS.map(ToOwned::to_owned);
        Self::new(&patterns).expect("the patterns above are names of headers")
    }
}

impl HeaderRules {
    /// Creates rules from patterns, each a header name or a prefix with a `*`. Returns `None` if a
    /// pattern is invalid.
    #[must_use]
    pub fn new(patterns: &[String]) -> Option<Self> {
        let (mut names, mut prefixes) = (Vec::new(), Vec::new());
        for pattern in patterns {
            let pattern = pattern.to_ascii_lowercase();
            let (name, is_prefix) = match pattern.strip_suffix('*') {
                Some(prefix) => (prefix, true),
                None => (&*pattern, false),
            };
            let parsed: HeaderName = name.parse().ok()?;
            if is_prefix {
                prefixes.push(name.to_owned());
            } else {
                names.push(parsed);
            }
        }
        Some(Self { names, prefixes })
    }

    pub(in crate::proxy) fn is_stripped(&self, name: &HeaderName) -> bool {
        let is_begun = |prefix: &String| name.as_str().starts_with(prefix.as_str());
        self.names.contains(name) || self.prefixes.iter().any(is_begun)
    }
}

/// Engine headers that clients do not get: other locations, the engine's identity, cookies of its
/// origin, and commands to proxies in front of the router.
const ENGINES_OWN: [&str; 9] = [
    "alt-svc",
    "content-location",
    "location",
    "refresh",
    "server",
    "set-cookie",
    "x-powered-by",
    "x-process-time",
    "x-sendfile",
];
/// Prefix of engine headers that are commands to nginx.
const ENGINES_OWN_PREFIX: &str = "x-accel-";

/// Whether a response header concerns the engine itself.
pub(in crate::proxy) fn is_engines_own(name: &HeaderName) -> bool {
    let name = name.as_str();
    ENGINES_OWN.contains(&name) || name.starts_with(ENGINES_OWN_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(body: &str) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let parsed = crate::prompt::parse("/v1/completions", &body).unwrap();
        match FieldRules::default().apply(&parsed, &body) {
            Ok(None) => "as it is".to_owned(),
            Ok(Some(body)) => String::from_utf8(body.to_vec()).unwrap(),
            Err(failure) => failure.to_string(),
        }
    }

    #[test]
    fn a_body_without_an_added_field_is_the_one_before() {
        for (before, added) in [
            (
                r#"{"model": "m", "n": 1}"#,
                r#"{"model": "m", "n": 1, "x": "text"}"#,
            ),
            (
                r#"{"model":"m","n":1}"#,
                r#"{"model":"m","n":1,"x":"text"}"#,
            ),
            (
                r#"{"model":"m","n":1}"#,
                r#"{"x":"text","model":"m","n":1}"#,
            ),
            (
                r#"{"model":"m","n":1}"#,
                r#"{"model":"m","x":"text","n":1}"#,
            ),
        ] {
            let body = Bytes::copy_from_slice(added.as_bytes());
            assert_eq!(without_field(&body, "x").unwrap(), before);
        }
    }

    #[test]
    fn reserved_fields_are_refused_or_stripped() {
        for (body, expected) in [
            (
                r#"{"model":"m","prompt":"priority","temperature":1}"#,
                "as it is",
            ),
            (r#"{"model":"m","metadata":{"priority":1}}"#, "as it is"),
            (r#"{"priority":-9,"model":"m"}"#, r#"{"model":"m"}"#),
            (r#"{"model":"m","priority":-9}"#, r#"{"model":"m"}"#),
            (
                r#" { "model" : "m" , "priority" : 1 , "n" : 1 } "#,
                r#" { "model" : "m" , "n" : 1 } "#,
            ),
            (r#"{"\u0070riority":-9,"model":"m"}"#, r#"{"model":"m"}"#),
            (
                r#"{"priority":1,"model":"m","priority":2,"x":3,"pr\u0069ority":3}"#,
                r#"{"model":"m","x":3}"#,
            ),
            (
                r#"{"model":"m","kv_transfer_params":{"remote_host":"x"}}"#,
                "kv_transfer_params: is not taken from clients here",
            ),
            (
                r#"{"model":"m","boot\u0073trap_host":"x","priority":1}"#,
                "bootstrap_host: is not taken from clients here",
            ),
        ] {
            assert_eq!(judged(body), expected, "{body}");
        }
        let many: String = (0..30).map(|nth| format!("\"f{nth}\":1,")).collect();
        assert_eq!(judged(&format!("{{{many}\"model\":\"m\"}}")), "as it is");
        let hidden = format!("{{{many}\"priority\":1,\"model\":\"m\"}}");
        assert_eq!(judged(&hidden), format!("{{{many}\"model\":\"m\"}}"));
    }

    #[test]
    fn a_field_is_replaced_wherever_it_is_and_nothing_else() {
        for (body, expected) in [
            (
                r#" { "model" : "a" , "n":1.0 }"#,
                r#" { "model" : "b\"" , "n":1.0 }"#,
            ),
            (
                r#"{"mod\u0065l":"a","x":{"model":"a"},"model":null}"#,
                r#"{"mod\u0065l":"b\"","x":{"model":"a"},"model":"b\""}"#,
            ),
            (r#"{"n":1}"#, r#"{"model":"b\"","n":1}"#),
            ("{ }", r#"{"model":"b\"" }"#),
        ] {
            let replaced = with_field(&Bytes::from(body), "model", r#""b\"""#).unwrap();
            assert_eq!(replaced, expected, "{body}");
        }
    }

    #[test]
    fn headers_are_stripped_by_name_and_prefix() {
        let rules = HeaderRules::default();
        for (name, is_stripped) in [
            ("x-data-parallel-rank", true),
            ("x-override-temperature", true),
            ("x-vllm-priority", true),
            ("x-data-parallel-ranks", false),
            ("x-overrid", false),
            ("content-type", false),
        ] {
            let name = HeaderName::from_static(name);
            assert_eq!(rules.is_stripped(&name), is_stripped, "{name}");
        }
        assert_eq!(HeaderRules::new(&["a b".to_owned()]), None);
        assert_eq!(HeaderRules::new(&["*".to_owned()]), None);
    }
}
