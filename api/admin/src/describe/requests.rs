//! Implementations of [`DescribeRequest`] for the extractors.

use axum::extract::{Extension, State};
use http::HeaderMap;
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::super::AdminState;
use super::super::answer::{JSON, Json, MaybeJson, PathName, PathParam, QueryParams};
use super::super::readback::{ReadBack, ReadBackJson, ReplacedSettings, WrittenSettings};
use super::super::restore::{BACKUP, BackupUpload};
use super::super::stream::LastEventId;
use super::super::versions::IfMatch;
use super::super::whoami::Caller;
use super::problems::{BODY_TIMEOUT, BODY_TOO_LARGE, CHANGED, CONTENT_TYPE, INVALID, NO_QUORUM};
use super::{BodyShape, CallShape, DescribeRequest, ParameterShape, Schemas};

impl DescribeRequest for State<AdminState> {
    fn describe(_: &mut CallShape, _: &mut Schemas) {}
}

impl DescribeRequest for Extension<Caller> {
    fn describe(_: &mut CallShape, _: &mut Schemas) {}
}

impl DescribeRequest for HeaderMap {
    fn describe(_: &mut CallShape, _: &mut Schemas) {}
}

impl DescribeRequest for BackupUpload {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.fails(&[INVALID, BODY_TIMEOUT, CONTENT_TYPE]);
        call.body = Some(BodyShape {
            media_type: BACKUP,
            is_required: true,
            schema: json!({ "type": "string", "contentMediaType": BACKUP }),
        });
    }
}

impl<T: JsonSchema> DescribeRequest for QueryParams<T> {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        let keys = Schemas::keys::<T>();
        if keys.iter().any(|key| key.name == "read") {
            call.fails(&[NO_QUORUM]);
        }
        call.query.extend(keys);
    }
}

impl<T: JsonSchema> DescribeRequest for PathParam<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        call.path = Some(schemas.request::<T>());
    }
}

impl DescribeRequest for PathName {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.path = Some(json!({ "type": "string", "minLength": 1, "maxLength": 256 }));
    }
}

impl DescribeRequest for IfMatch {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.fails(&[CHANGED, NO_QUORUM]);
        call.headers.push(ParameterShape {
            name: "If-Match".to_owned(),
            is_required: false,
            schema: json!({
                "type": "string",
                "pattern": "^(\\*|\"[!#-~]*\"(, ?\"[!#-~]*\")*)$",
                "description": "`ETag` of the version that was read: the write takes place only if that is still current, else 412. `*`: any version, if there is one.",
                "examples": ["\"1f0c7e9d5b3a48266c1de5f0a9b7c384\""],
            }),
        });
    }
}

impl DescribeRequest for LastEventId {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.headers.push(ParameterShape {
            name: "Last-Event-ID".to_owned(),
            is_required: false,
            schema: json!({
                "type": "string",
                "description": "Id of the last event that the client received: later ones that are still kept are sent first.",
                "examples": ["5bd0a1f7-42"],
            }),
        });
    }
}

fn takes_json(call: &mut CallShape, schema: Value, is_required: bool) {
    call.fails(&[INVALID, BODY_TIMEOUT, BODY_TOO_LARGE, CONTENT_TYPE]);
    call.body = Some(BodyShape {
        media_type: JSON,
        is_required,
        schema,
    });
}

impl<T: JsonSchema> DescribeRequest for Json<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.request::<T>();
        takes_json(call, schema, true);
    }
}

impl<T: JsonSchema> DescribeRequest for MaybeJson<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.request::<T>();
        takes_json(call, schema, false);
    }
}

impl<T: ReplacedSettings + JsonSchema> DescribeRequest for WrittenSettings<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let config = schemas.request::<T>();
        let shown = T::AROUND.iter().map(|name| ((*name).to_owned(), json!({})));
        let mut properties: Map<String, Value> = shown.collect();
        properties.insert("config".to_owned(), config.clone());
        let around = json!({
            "type": "object",
            "description": "An edited response of `GET`. Only `config` is written.",
            "properties": properties,
            "required": ["config"],
            "additionalProperties": false,
        });
        let both = json!({ "anyOf": [config, around], "examples": [T::example()] });
        takes_json(call, both, true);
    }
}

impl<T: ReadBack + JsonSchema> DescribeRequest for ReadBackJson<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.request::<T>();
        takes_json(call, schema, true);
    }
}
