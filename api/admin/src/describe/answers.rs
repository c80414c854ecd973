//! Implementations of [`DescribeResponse`] for the types of responses.

use axum::response::Html;
use schemars::JsonSchema;
use serde_json::{Value, json};

use super::super::answer::{Answer, Changed, JSON, WriteResponse, Written, WrittenWith};
use super::super::backup::BackupFile;
use super::super::console::ConsoleAnswer;
use super::super::openapi::OpenApi;
use super::super::probes::{MetricsAnswer, ReadinessAnswer};
use super::super::recordings::RecordingFile;
use super::super::stream::EventsAnswer;
use super::super::usage::{UsageAnswer, UsageList};
use super::super::versions::Versioned;
use super::problems::{
    INVALID, LIMIT, NO_QUORUM, NOT_INITIALISED, OUTCOME_UNKNOWN, REFUSED, STALE_SESSION, TOO_LARGE,
    UNKNOWN_HOST,
};
use super::{AnswerShape, CallShape, DescribeResponse, Schemas};
use api::cluster::events::NumberedEvent;
use api::error::Problem;
use api::readiness::Readiness;

/// Description of the event stream.
const EVENTS: &str = "Server-sent events. The first is `connected`. Each event of the cluster has its \
    kind as `event`, an `id` and a JSON object as `data`. `missed` stands for events that this \
    client does not receive: `events` is their number, `null` if unknown.";

/// Returns the shape of a JSON response.
fn document(status: u16, what: &'static str, schema: Value) -> AnswerShape {
    AnswerShape {
        status,
        what,
        media_type: JSON,
        schema,
        headers: Vec::new(),
    }
}

/// Returns the shape of a response with status 200 that is not JSON.
fn other(media_type: &'static str, what: &'static str) -> AnswerShape {
    AnswerShape {
        media_type,
        ..document(200, what, json!({ "type": "string" }))
    }
}

impl<T: DescribeResponse> DescribeResponse for Result<T, Problem> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        T::describe(call, schemas);
    }
}

impl<T: JsonSchema> DescribeResponse for Answer<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.response::<T>();
        call.answers
            .push(document(200, "The requested data.", schema));
    }
}

impl<T: JsonSchema> DescribeResponse for Versioned<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let mut answer = document(200, "The requested data.", schemas.response::<T>());
        answer.headers = vec![(
            "ETag",
            "Version of what `PUT` writes, for `If-Match`. It does not cover figures that change by themselves.",
        )];
        call.answers.push(answer);
    }
}

/// Adds the response to a write that goes through the log, and the problems that every such write
/// can return.
fn writes(call: &mut CallShape, schema: Value) {
    call.fails(&[
        INVALID,
        LIMIT,
        NOT_INITIALISED,
        NO_QUORUM,
        OUTCOME_UNKNOWN,
        STALE_SESSION,
        TOO_LARGE,
    ]);
    call.answers.push(document(200, "Committed.", schema));
}

impl DescribeResponse for Written {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.response::<WriteResponse>();
        writes(call, schema);
    }
}

impl<T: JsonSchema> DescribeResponse for WrittenWith<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.response::<T>();
        writes(call, schema);
    }
}

impl<T: JsonSchema> DescribeResponse for Changed<T> {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        call.fails(&[OUTCOME_UNKNOWN, REFUSED]);
        let schema = schemas.response::<T>();
        call.answers.push(document(200, "Done.", schema));
    }
}

impl DescribeResponse for ReadinessAnswer {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let schema = schemas.response::<Readiness>();
        let fit = document(200, "The replica accepts traffic.", schema.clone());
        let unfit = document(
            503,
            "It does not accept traffic, for the given reasons.",
            schema,
        );
        call.answers.extend([fit, unfit]);
    }
}

impl DescribeResponse for UsageAnswer {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        Answer::<UsageList>::describe(call, schemas);
        call.answers.push(other(
            "text/csv",
            "All rows, in columns with the names of the JSON fields.",
        ));
    }
}

impl DescribeResponse for MetricsAnswer {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.answers.extend([
            other(
                "text/plain",
                "Metrics, in the format that `Accept` prefers.",
            ),
            other("application/openmetrics-text", "Metrics."),
        ]);
    }
}

impl DescribeResponse for EventsAnswer {
    fn describe(call: &mut CallShape, schemas: &mut Schemas) {
        let data = schemas.response::<NumberedEvent>();
        let stream = json!({ "type": "string", "x-quorate-event-data": data });
        call.answers.push(AnswerShape {
            schema: stream,
            ..other("text/event-stream", EVENTS)
        });
    }
}

impl DescribeResponse for BackupFile {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        let file = json!({ "type": "string", "contentMediaType": "application/octet-stream" });
        call.answers.push(AnswerShape {
            schema: file,
            headers: vec![("Content-Disposition", "A file name.")],
            ..other("application/octet-stream", "The backup.")
        });
    }
}

impl DescribeResponse for RecordingFile {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.answers.push(AnswerShape {
            headers: vec![("Content-Disposition", "A file name.")],
            ..other(
                "application/jsonl",
                "The recording: a header line, and a line for each request.",
            )
        });
    }
}

impl DescribeResponse for OpenApi {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        let schema = json!({ "type": "object", "properties": { "openapi": { "const": "3.1.0" } } });
        call.answers.push(document(200, "The document.", schema));
    }
}

impl DescribeResponse for ConsoleAnswer {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.fails(&[UNKNOWN_HOST]);
        call.answers.push(AnswerShape {
            status: 304,
            ..other("text/html", "Not modified, according to `If-None-Match`.")
        });
        call.answers.extend([
            other("text/html", "A page, which contains no data."),
            other("text/css", "Its style."),
            other("text/javascript", "One of its scripts."),
            other("image/svg+xml", "Its icon."),
        ]);
    }
}

impl DescribeResponse for Html<String> {
    fn describe(call: &mut CallShape, _: &mut Schemas) {
        call.answers.push(other("text/html", "A page."));
    }
}
