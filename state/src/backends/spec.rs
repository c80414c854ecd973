//! Descriptions of a backend by operators and engines, and their bounds.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::role::BackendRole;
use crate::bounds::{LIST_BYTES_MAX, NAME_BYTES_MAX};
use crate::reject::Rejection;
use crate::validate::{ensure, is_name, is_plain};

/// Maximum number of models of one backend, and of its labels.
const LIST_ENTRIES_MAX: usize = 256;
/// Maximum number of models that an engine lists, including its adapters.
const ENGINE_MODELS_MAX: usize = 4096;

/// Description of a backend by an operator or a discovery source.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendSpec {
    /// Id of the backend: `[A-Za-z0-9._-]`, at most `NAME_BYTES_MAX` bytes.
    pub id: String,
    /// Base URL, `http://host:port` or `https://host:port`, with an optional path prefix.
    pub url: String,
    /// Ids of the models that the backend serves; `"*"` stands for those that its engine lists.
    #[serde(default = "any_model")]
    pub models: Vec<String>,
    /// Arbitrary labels for filters and display.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Cache capacity in blocks of the router's block size; `None` to ask the engine.
    #[serde(default)]
    pub capacity_blocks: Option<u32>,
    /// ZMQ endpoint of the engine's KV events. Without one, ownership follows from leases.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// ZMQ endpoint at which the engine replays KV events, if any.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// Stage of requests that the backend computes.
    #[serde(default)]
    pub role: BackendRole,
}

fn any_model() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Facts that an engine reports about itself. A field is `null` if it was not asked or not
/// reported.
#[derive(
    Debug, Clone, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
pub struct EngineFacts {
    /// Model ids from its `/v1/models`, sorted.
    pub models: Option<Vec<String>>,
    /// Cache capacity in the *router's* blocks, converted by the replica that asked.
    pub capacity_blocks: Option<u32>,
    /// Start time of the engine process, in Unix seconds. A later time than the known one means
    /// that the engine restarted: its cache is empty, and a new incarnation begins.
    pub started_at_s: Option<u64>,
    /// Whether the engine computes the last block of every hit again, as vLLM does with speculators
    /// that read the model's hidden states (EAGLE, MTP). Learned from the responses of an engine
    /// that speculates.
    pub drops_last_block: Option<bool>,
}

impl BackendSpec {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(
            is_name(&self.id) && is_plain(&self.id),
            "id",
            "1 to 256 characters of [A-Za-z0-9._-]",
        )?;
        ensure(
            is_base_url(&self.url),
            "url",
            "http://host:port or https://host:port, with a path prefix if wanted",
        )?;
        ensure(
            (1..=LIST_ENTRIES_MAX).contains(&self.models.len()),
            "models",
            "1 to 256 model ids, or \"*\"",
        )?;
        for (place, model) in self.models.iter().enumerate() {
            ensure(
                is_name(model),
                &format!("models[{place}]"),
                "1 to 256 bytes",
            )?;
        }
        ensure(
            is_short_list(&self.models),
            "models",
            "at most 64 KiB together",
        )?;
        ensure(
            self.labels.len() <= LIST_ENTRIES_MAX,
            "labels",
            "at most 256 labels",
        )?;
        for (name, value) in &self.labels {
            ensure(is_name(name), "labels", "label names of 1 to 256 bytes")?;
            let field = format!("labels.{name}");
            ensure(value.len() <= NAME_BYTES_MAX, &field, "at most 256 bytes")?;
        }
        let label_texts = self.labels.iter().flat_map(|(name, value)| [name, value]);
        ensure(
            is_short_list(label_texts),
            "labels",
            "at most 64 KiB together",
        )?;
        ensure(
            self.capacity_blocks != Some(0),
            "capacity_blocks",
            "at least 1",
        )?;
        for (field, endpoint) in [
            ("kv_events", &self.kv_events),
            ("kv_replay", &self.kv_replay),
        ] {
            let is_valid = endpoint.as_deref().is_none_or(is_name);
            ensure(is_valid, field, "an endpoint of 1 to 256 bytes")?;
        }
        Ok(())
    }
}

impl EngineFacts {
    /// Replaces what `newer` knows. Keeps the rest.
    pub fn update(&mut self, newer: Self) {
        let Self {
            models,
            capacity_blocks,
            started_at_s,
            drops_last_block,
        } = newer;
        self.models = models.or(self.models.take());
        self.capacity_blocks = capacity_blocks.or(self.capacity_blocks);
        self.started_at_s = started_at_s.or(self.started_at_s);
        self.drops_last_block = drops_last_block.or(self.drops_last_block);
    }

    /// Whether all fields are within their bounds.
    pub(crate) fn is_valid(&self) -> bool {
        let is_list = |models: &Vec<String>| {
            models.len() <= ENGINE_MODELS_MAX
                && models.iter().all(|model| is_name(model))
                && is_short_list(models)
        };
        self.models.as_ref().is_none_or(is_list) && self.capacity_blocks != Some(0)
    }
}

/// Whether `texts` have at most [`LIST_BYTES_MAX`] bytes in total, which bounds the size of a
/// registry in a snapshot.
fn is_short_list<'a>(texts: impl IntoIterator<Item = &'a String>) -> bool {
    texts.into_iter().map(String::len).sum::<usize>() <= LIST_BYTES_MAX
}

/// Whether `url` is `http://host:port` or `https://host:port`, with an optional `/prefix`. The host
/// is a name, an IPv4 address, or an IPv6 address in brackets.
fn is_base_url(url: &str) -> bool {
    let Some(rest) = url
        .strip_prefix("http://")
        .or_else(|| url.strip_prefix("https://"))
        .filter(|_| url.len() <= NAME_BYTES_MAX)
    else {
        return false;
    };
    let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let Some((host, port)) = authority.rsplit_once(':') else {
        return false;
    };
    let is_host = match host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
    {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let is_host_byte = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
            !host.is_empty() && host.bytes().all(is_host_byte)
        }
    };
    let is_port =
        port.bytes().all(|c| c.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    is_host && is_port && is_prefix(prefix)
}

/// Whether `prefix` is empty, or consists of `/segment`s that every server parses alike.
fn is_prefix(prefix: &str) -> bool {
    let is_byte = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-' | b'~');
    let is_segment = |segment: &str| {
        !segment.is_empty() && segment.bytes().all(is_byte) && !segment.bytes().all(|c| c == b'.')
    };
    prefix.is_empty() || prefix.split('/').skip(1).all(is_segment)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn spec() -> BackendSpec {
        BackendSpec {
            id: "gpu-1".to_owned(),
            url: "http://10.0.0.1:8000".to_owned(),
            models: vec!["*".to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: None,
            kv_events: None,
            kv_replay: None,
            role: BackendRole::Both,
        }
    }

    #[test]
    fn urls_require_scheme_host_and_port() {
        for good in [
            "http://a:1",
            "http://10.0.0.1:65535",
            "http://[::1]:80",
            "http://a_b.c-d:9",
            "http://a:1/x",
            "http://a:1/x/y-1.0~",
            "https://a:1",
            "https://a:443/x",
        ] {
            assert!(is_base_url(good), "{good}");
        }
        for bad in [
            "",
            "a:1",
            "http://a",
            "http://:1",
            "http://a:0",
            "http://a:65536",
            "http://a:1/",
            "http://a:1//x",
            "http://a:1/x/",
            "http://a:1/../x",
            "http://a:1/x?y",
            "http://a/x",
            "https://a",
            "httpss://a:1",
            "http://a:+1",
            "http://a b:1",
            "http://[::1:80",
            "http://u@a:1",
        ] {
            assert!(!is_base_url(bad), "{bad}");
        }
    }

    #[test]
    fn an_invalid_spec_names_the_field() {
        let name_long = "x".repeat(NAME_BYTES_MAX + 1);
        let one = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let faults = [
            BackendSpec {
                id: String::new(),
                ..spec()
            },
            BackendSpec {
                id: "a/b".to_owned(),
                ..spec()
            },
            BackendSpec {
                id: name_long.clone(),
                ..spec()
            },
            BackendSpec {
                url: "gpu-1:8000".to_owned(),
                ..spec()
            },
            BackendSpec {
                models: Vec::new(),
                ..spec()
            },
            BackendSpec {
                models: vec!["*".to_owned(), String::new()],
                ..spec()
            },
            BackendSpec {
                labels: one("", "x"),
                ..spec()
            },
            BackendSpec {
                labels: one("zone", &name_long),
                ..spec()
            },
            BackendSpec {
                capacity_blocks: Some(0),
                ..spec()
            },
            BackendSpec {
                kv_events: Some(String::new()),
                ..spec()
            },
        ]
        .map(|spec| spec.validate().unwrap_err().to_string())
        .join("\n");
        expect_test::expect![[r#"
            id: 1 to 256 characters of [A-Za-z0-9._-]
            id: 1 to 256 characters of [A-Za-z0-9._-]
            id: 1 to 256 characters of [A-Za-z0-9._-]
            url: http://host:port or https://host:port, with a path prefix if wanted
            models: 1 to 256 model ids, or "*"
            models[1]: 1 to 256 bytes
            labels: label names of 1 to 256 bytes
            labels.zone: at most 256 bytes
            capacity_blocks: at least 1
            kv_events: an endpoint of 1 to 256 bytes"#]]
        .assert_eq(&faults);
        assert_eq!(spec().validate(), Ok(()));
    }

    #[test]
    fn longest_backends_fit_in_commands_and_a_snapshot() {
        use crate::bounds::BACKENDS_MAX;
        use crate::{codec, encoding};

        let names = |count: usize, bytes: usize| (0..count).map(move |at| format!("{at:0>bytes$}"));
        let half = NAME_BYTES_MAX / 2;
        let longest = BackendSpec {
            id: "x".repeat(NAME_BYTES_MAX),
            url: format!("http://{}:1", "x".repeat(NAME_BYTES_MAX - 9)),
            models: names(256, NAME_BYTES_MAX).collect(),
            labels: names(256, half).zip(names(256, half)).collect(),
            capacity_blocks: Some(u32::MAX),
            kv_events: Some("x".repeat(NAME_BYTES_MAX)),
            kv_replay: Some("x".repeat(NAME_BYTES_MAX)),
            role: BackendRole::Both,
        };
        // Short names have the largest overhead in the encoding.
        let facts = EngineFacts {
            models: Some(names(ENGINE_MODELS_MAX, 16).collect()),
            capacity_blocks: Some(u32::MAX),
            started_at_s: Some(u64::MAX),
            drops_last_block: Some(true),
        };
        assert_eq!((longest.validate(), facts.is_valid()), (Ok(()), true));
        let bytes = encoding::to_bytes(&longest).len() + encoding::to_bytes(&facts).len();
        assert!((bytes + 64) * BACKENDS_MAX < encoding::SECTION_BYTES_MAX);
        assert!(bytes < codec::ENVELOPE_BYTES_MAX);

        let mut more = longest.clone();
        more.labels.insert("y".to_owned(), String::new());
        assert!(more.validate().is_err());
        let long_names = EngineFacts {
            models: Some(names(257, NAME_BYTES_MAX).collect()),
            ..facts
        };
        assert!(!long_names.is_valid());
    }
}
