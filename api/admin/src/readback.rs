//! `PUT` bodies in the form of `GET` responses: a client that reads, edits and writes back need not
//! know which fields are writable. The others are ignored.

use std::marker::PhantomData;

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use schemars::{Schema, json_schema};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::answer::{JSON, decode, read_body};
use super::origin::typed;
use api::error::Problem;

/// Settings that are replaced as a whole.
pub(super) trait ReplacedSettings {
    /// Names of the read-only fields of a response that surround the settings in `config`.
    const AROUND: &'static [&'static str] = &["index"];

    /// Returns example settings for the API description.
    fn example() -> Value;
}

/// Extractor of the settings of type `T` from a body.
pub(super) struct WrittenSettings<T> {
    /// JSON of the settings, without the fields around them.
    pub(super) config: Bytes,
    /// Field `is_of_model` of the response from which the settings were read, if it has one.
    pub(super) is_of_model: Option<bool>,
    form: PhantomData<T>,
}

impl<T: ReplacedSettings> WrittenSettings<T> {
    /// Extracts the settings from a body: all of it, or `config` if it has the form of a response.
    pub(super) fn of(body: Bytes) -> Self {
        let document: Option<Map<String, Value>> = serde_json::from_slice(&body).ok();
        let is_answer = |document: &Map<String, Value>| {
            let is_around = |name: &String| name == "config" || T::AROUND.contains(&name.as_str());
            document.get("config").is_some_and(Value::is_object) && document.keys().all(is_around)
        };
        match document.filter(is_answer) {
            Some(document) => Self {
                config: document["config"].to_string().into(),
                is_of_model: document.get("is_of_model").and_then(Value::as_bool),
                form: PhantomData,
            },
            None => Self {
                config: body,
                is_of_model: None,
                form: PhantomData,
            },
        }
    }
}

impl<T: ReplacedSettings, S: Sync> FromRequest<S> for WrittenSettings<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), JSON)?;
        Ok(Self::of(read_body(request.into_body()).await?))
    }
}

/// A request body whose `GET` response also has read-only fields.
pub(super) trait ReadBack: DeserializeOwned {
    /// Names of the read-only fields.
    const SHOWN: &'static [&'static str];
}

/// Extractor of a JSON body that ignores the read-only fields of a response.
pub(super) struct ReadBackJson<T>(pub(super) T);

impl<T: ReadBack, S: Sync> FromRequest<S> for ReadBackJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), JSON)?;
        let body = read_body(request.into_body()).await?;
        let document: Option<Map<String, Value>> = serde_json::from_slice(&body).ok();
        let is_shown = |name: &String| T::SHOWN.contains(&name.as_str());
        match document.filter(|document| document.keys().any(is_shown)) {
            None => Ok(Self(decode(&body)?)),
            Some(mut document) => {
                document.retain(|name, _| !is_shown(name));
                Ok(Self(decode(
                    Value::Object(document).to_string().as_bytes(),
                )?))
            }
        }
    }
}

/// Adds the read-only fields to the schema of a body.
pub(super) fn with_shown<T: ReadBack>(schema: &mut Schema) {
    let shown = json_schema!({ "description": "As returned by `GET`; ignored." });
    let fields = schema
        .ensure_object()
        .entry("properties")
        .or_insert(json!({}));
    for name in T::SHOWN {
        fields[*name] = shown.clone().to_value();
    }
}
