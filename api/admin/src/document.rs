//! The OpenAPI document, generated from the table of routes and the handlers' signatures.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::Method;
use serde_json::{Map, Value, json};

use super::describe::problems::{
    self, CERTIFICATE, INVALID, OTHER_SITE, ProblemKind, ROLE, TOO_MANY_WRONG_TOKENS, UNAUTHORIZED,
    UNKNOWN_HOST,
};
use super::describe::{AnswerShape, BodyShape, CallShape, ParameterShape, Schemas};
use super::problem::invalid;
use super::roles::Permission;
use super::routes::{CallInfo, ROUTES, RouteInfo, asked};
use api::error::Problem;

/// OpenAPI description of the admin API.
pub(super) struct ApiDescription {
    /// The OpenAPI document, as JSON.
    pub(super) text: Bytes,
    /// Accepted query keys, by path and method.
    keys: BTreeMap<&'static str, BTreeMap<&'static str, Vec<String>>>,
}

/// Description of the admin API, which is the same for every listener.
pub(super) static API: LazyLock<ApiDescription> = LazyLock::new(ApiDescription::make);

/// Path prefix, tag and description of each area of the API. The first matching prefix applies. The
/// description is empty if another entry of the same tag has it.
const TAGS: [(&str, &str, &str); 8] = [
    (
        "/admin/v1/cluster",
        "cluster",
        "Members, leadership, snapshots, backups.",
    ),
    ("/admin/v1/digest", "cluster", ""),
    (
        "/admin/v1/backends",
        "backends",
        "The engines that requests go to.",
    ),
    ("/admin/v1/discovery", "backends", ""),
    (
        "/admin/v1/users",
        "users",
        "The users that tokens are charged to, and their API keys.",
    ),
    ("/admin/v1/keys", "users", ""),
    (
        "/admin/v1/",
        "routing",
        "How requests are routed and admitted, and what these decisions are based on.",
    ),
    (
        "/",
        "replica",
        "This process: probes, metrics, the console, this document.",
    ),
];

const ABOUT: &str = "Operators query and change the cluster at any replica.\n\n\
Reads return the state that this replica has applied, with its log index. With \
`read=linearizable` they first wait until everything committed before is applied here. Writes \
go through the log and return the index at which they were committed, or `outcome-unknown` if \
that is not known. The response to `GET` can be edited and sent to `PUT`, with its `ETag` as \
`If-Match` so that concurrent writes are not lost.\n\n\
Lists return up to `limit` entries and `next_cursor`, which is the `cursor` of the next page \
and is absent on the last one. An unknown query key is refused (400). Every error is a problem \
(RFC 9457): an unknown path is 404 `unknown-path`, a method that the path does not accept is \
405 `wrong-method` with `Allow`. With 429 and 503, `Retry-After` is the time until a retry \
makes sense.";

impl ApiDescription {
    fn make() -> Self {
        let mut schemas = Schemas::new();
        let mut keys = BTreeMap::new();
        let mut calls = Vec::new();
        for route in ROUTES {
            for call in route.calls {
                let shape = shape_of(route, call, &mut schemas);
                let names = shape.query.iter().map(|key| key.name.clone());
                let of_path: &mut BTreeMap<_, _> = keys.entry(route.path).or_default();
                of_path.insert(call.method.as_str(), names.collect());
                calls.push((route, call, shape));
            }
        }
        let problem = schemas.response_problem();
        let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
        for (route, call, shape) in calls {
            let method = call.method.as_str().to_ascii_lowercase();
            let path = paths.entry(route.path).or_default();
            path.insert(method, operation(route, call, shape, &problem));
        }
        let mut paths = json!(paths);
        let (named, request_names) = schemas.named();
        request_names.settle(&mut paths);
        let document = json!({
            "openapi": "3.1.0",
            "info": {
                "title": "Quorate admin API",
                "version": env!("CARGO_PKG_VERSION"),
                "description": ABOUT,
                "contact": { "name": "Quorate", "url": env!("CARGO_PKG_REPOSITORY") },
                "license": {
                    "name": "Apache-2.0",
                    "url": "https://www.apache.org/licenses/LICENSE-2.0",
                },
            },
            "servers": [{ "url": "/", "description": "The admin listener of any replica." }],
            "tags": tags(),
            "x-quorate-problems": problem_types(),
            "paths": paths,
            "components": { "schemas": named, "securitySchemes": security_schemes() },
        });
        let text = serde_json::to_vec_pretty(&document).expect("it has string keys only");
        Self {
            text: text.into(),
            keys,
        }
    }

    /// Returns the query keys that a call accepts; `None` if the call does not exist.
    fn keys(&self, path: &str, method: &Method) -> Option<&[String]> {
        let keys = self.keys.get(path)?.get(asked(method).as_str());
        keys.map(Vec::as_slice)
    }
}

/// Rejects a request with a repeated query key, or with one that its call does not accept.
pub(super) async fn known_keys(request: Request, next: Next) -> Response {
    match check_keys(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

fn check_keys(request: &Request) -> Result<(), Problem> {
    let path = request.extensions().get::<MatchedPath>();
    let known = path.and_then(|path| API.keys(path.as_str(), request.method()));
    let Some(known) = known else {
        return Ok(());
    };
    let query = request.uri().query().unwrap_or_default();
    let mut given = BTreeSet::new();
    for (key, _) in form_urlencoded::parse(query.as_bytes()) {
        if !known.iter().any(|it| *it == key) {
            let expected = match known {
                [] => "expected none".to_owned(),
                known => format!("expected one of {}", known.join(", ")),
            };
            return Err(
                invalid(&key, format!("unknown query key, {expected}")).member("allowed", known)
            );
        }
        if !given.insert(key.clone()) {
            return Err(invalid(&key, "given twice, expected once"));
        }
    }
    Ok(())
}

fn shape_of(route: &RouteInfo, call: &CallInfo, schemas: &mut Schemas) -> CallShape {
    let mut shape = CallShape::default();
    ((call.handler)().describe)(&mut shape, schemas);
    shape.fails(call.problems);
    shape.fails(&[INVALID]);
    if call.permission != Permission::Open {
        shape.fails(&[UNAUTHORIZED, ROLE, CERTIFICATE, TOO_MANY_WRONG_TOKENS]);
        shape.fails(&[UNKNOWN_HOST]);
    }
    if call.method != Method::GET {
        shape.fails(&[OTHER_SITE]);
    }
    assert_eq!(
        route.path.contains('{'),
        shape.path.is_some(),
        "the path {} and the arguments of its handler differ",
        route.path
    );
    shape
}

fn operation(route: &RouteInfo, call: &CallInfo, shape: CallShape, problem: &Value) -> Value {
    let mut parameters = Vec::new();
    if let Some(schema) = shape.path {
        let name = route.path.split(['{', '}']).nth(1).unwrap_or_default();
        parameters.push(json!({
            "name": name,
            "in": "path",
            "required": true,
            "description": part_of(route.path),
            "schema": schema,
        }));
    }
    let listed = shape.query.into_iter().map(|it| parameter("query", it));
    parameters.extend(listed);
    parameters.extend(shape.headers.into_iter().map(|it| parameter("header", it)));
    let mut responses = Map::new();
    for answer in &shape.answers {
        add_answer(&mut responses, answer);
    }
    for kind in shape.problems {
        add_problem(&mut responses, kind, problem);
    }
    let (summary, rest) = match call.what.split_once(". ") {
        Some((first, _)) => (first, call.what),
        None => (call.what.trim_end_matches('.'), call.what),
    };
    let role = match call.permission {
        Permission::Open => "none",
        Permission::Scrape | Permission::Role(_) => call.permission.role().name(),
    };
    let mut operation = json!({
        "operationId": call.id,
        "tags": [tag(route.path)],
        "summary": summary,
        "description": format!("{rest}\n\n{}", who(call.permission)),
        "x-quorate-role": role,
        "security": security(call.permission),
        "parameters": parameters,
        "responses": responses,
    });
    if let Some(body) = &shape.body {
        operation["requestBody"] = request_body(body);
    }
    operation
}

/// Returns the description of the variable part of a path.
fn part_of(path: &str) -> &'static str {
    let parts = [
        ("/admin/v1/backends/", "Id of the backend."),
        ("/admin/v1/blocks/", "Hash of the block, 16 hex digits."),
        ("/admin/v1/cluster/", "Id of the replica, 1 to 255."),
        (
            "/admin/v1/decisions/",
            "Id of the request, from `x-request-id` of its response.",
        ),
        ("/admin/v1/keys/", "Id of the API key, 16 hex digits."),
        ("/admin/v1/recordings/", "Id of the recording."),
        (
            "/admin/v1/session-trees/",
            "Id of the tree's root, 16 hex digits.",
        ),
        ("/admin/v1/sessions/", "Id of the session, 16 hex digits."),
        ("/admin/v1/users/", "Name of the user."),
        ("/console/", "Name of the file."),
    ];
    let found = parts
        .iter()
        .find(|(beginning, _)| path.starts_with(beginning));
    found.expect("each variable part is explained").1
}

fn who(permission: Permission) -> String {
    match permission {
        Permission::Open => "Anybody may call it.".to_owned(),
        Permission::Scrape => {
            "Needs the role `viewer`, unless `admin.metrics_public` opens it.".to_owned()
        }
        Permission::Role(role) => format!("Needs the role `{role}`."),
    }
}

fn security(permission: Permission) -> Value {
    match permission {
        Permission::Open => json!([]),
        Permission::Scrape => json!([{}, { "token": [] }, { "certificate": [] }]),
        Permission::Role(_) => json!([{ "token": [] }, { "certificate": [] }]),
    }
}

fn security_schemes() -> Value {
    json!({
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `admin.tokens_file`; `quorate token create` makes one.",
        },
        "certificate": {
            "type": "mutualTLS",
            "description": "A certificate of an operator; `quorate cert client` makes one.",
        },
    })
}

fn parameter(place: &str, parameter: ParameterShape) -> Value {
    let ParameterShape {
        name,
        is_required,
        mut schema,
    } = parameter;
    let fields = schema.as_object_mut();
    let description = fields.and_then(|schema| schema.remove("description"));
    let mut shown = json!({ "name": name, "in": place, "required": is_required, "schema": schema });
    if let Some(description) = description {
        shown["description"] = description;
    }
    shown
}

fn request_body(body: &BodyShape) -> Value {
    let mut content = json!({ "schema": body.schema });
    // Repeat the schema's own example here, where readers of OpenAPI look for it.
    if let Some(example) = body.schema["examples"].get(0) {
        content["example"] = example.clone();
    }
    json!({ "required": body.is_required, "content": { body.media_type: content } })
}

fn add_answer(responses: &mut Map<String, Value>, answer: &AnswerShape) {
    let headers = answer.headers.iter().map(|(name, what)| {
        let header = json!({ "description": what, "schema": { "type": "string" } });
        ((*name).to_owned(), header)
    });
    let headers: Map<String, Value> = headers.collect();
    let response = responses
        .entry(answer.status.to_string())
        .or_insert_with(|| {
            let mut response = json!({ "description": answer.what, "content": {} });
            if !headers.is_empty() {
                response["headers"] = headers.into();
            }
            if answer.status == 503 {
                response["headers"] = retry_after();
            }
            response
        });
    response["content"][answer.media_type] = json!({ "schema": answer.schema });
}

fn retry_after() -> Value {
    let seconds = json!({ "type": "integer", "minimum": 0 });
    json!({ "Retry-After": { "description": "Seconds until a retry makes sense.", "schema": seconds } })
}

fn add_problem(responses: &mut Map<String, Value>, kind: ProblemKind, problem: &Value) {
    let ProblemKind { status, name, what } = kind;
    let response = responses.entry(status.to_string()).or_insert_with(|| {
        let mut response = json!({ "description": "", "content": {} });
        match status {
            401 => {
                let schema = json!({ "type": "string", "const": "Bearer" });
                let header =
                    json!({ "description": "How callers authenticate.", "schema": schema });
                response["headers"] = json!({ "WWW-Authenticate": header });
            }
            429 | 503 => response["headers"] = retry_after(),
            _ => {}
        }
        response
    });
    let before = response["description"].as_str().unwrap_or_default();
    let after = format!(
        "{before}{}`{name}`: {what}",
        if before.is_empty() { "" } else { "\n\n" }
    );
    response["description"] = after.into();
    let content = response["content"]
        .as_object_mut()
        .expect("an object since it was made");
    let content = content.entry(problems::MEDIA_TYPE);
    let content = content.or_insert_with(|| json!({ "schema": problem, "examples": {} }));
    let title = what.split(['.', ';']).next().unwrap_or_default();
    content["examples"][name] = json!({
        "value": { "type": format!("/problems/{name}"), "title": title, "status": status },
    });
}

/// Returns all types of problems, including those for unknown paths and methods.
fn problem_types() -> Vec<Value> {
    let kinds = problems::ALL.iter();
    let types = kinds.map(|kind| {
        let name = format!("/problems/{}", kind.name);
        json!({ "type": name, "status": kind.status, "description": kind.what })
    });
    types.collect()
}

fn tag(path: &str) -> &'static str {
    let mut tags = TAGS.iter();
    let found = tags.find(|(beginning, ..)| path.starts_with(beginning));
    found.map_or("replica", |(_, tag, _)| tag)
}

fn tags() -> Vec<Value> {
    let described = TAGS.iter().filter(|(_, _, what)| !what.is_empty());
    let tags: BTreeMap<_, _> = described.map(|(_, name, what)| (name, what)).collect();
    let tags = tags
        .iter()
        .map(|(name, what)| json!({ "name": name, "description": what }));
    tags.collect()
}
