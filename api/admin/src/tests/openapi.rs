//! The OpenAPI document contains the entries of the table of routes, and no others.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use expect_test::expect_file;

use super::super::describe::problems::{ALL, ProblemKind};
use super::super::document::API;
use super::super::roles::Permission;
use super::*;

pub(super) fn document() -> Value {
    serde_json::from_slice(&API.text).unwrap()
}

/// Returns all operations as path, method and description.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap();
    let mut all = Vec::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().unwrap() {
            all.push((path.as_str(), method.as_str(), operation));
        }
    }
    all
}

/// Returns the operation that handles a request; `None` if no path or method matches.
fn operation<'a>(document: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let method = if method == "HEAD" { "GET" } else { method };
    let parts: Vec<_> = path.split('/').collect();
    let fits = |template: &str| {
        let wanted: Vec<_> = template.split('/').collect();
        let mut pairs = wanted.iter().zip(&parts);
        wanted.len() == parts.len()
            && pairs.all(|(wanted, part)| wanted.starts_with('{') || wanted == part)
    };
    let all = operations(document).into_iter();
    let mut found =
        all.filter(|(template, of, _)| of.eq_ignore_ascii_case(method) && fits(template));
    found.next().map(|(_, _, operation)| operation)
}

/// Checks that a response is documented.
pub(super) fn check_documented(method: &str, path: &str, answer: &Answer) {
    static DOCUMENT: std::sync::LazyLock<Value> = std::sync::LazyLock::new(document);
    let what = format!("{method} {path}: {} {}", answer.status, answer.body);
    let status = answer.status.as_u16();
    let media_type = answer
        .headers
        .get("content-type")
        .map(|it| it.to_str().unwrap());
    let media_type = media_type.and_then(|it| it.split(';').next());
    if media_type == Some("application/problem+json") {
        let problem = answer.json();
        let kind = problem["type"].as_str().unwrap();
        let is_it =
            |it: &ProblemKind| format!("/problems/{}", it.name) == kind && it.status == status;
        assert!(ALL.iter().any(is_it), "unknown problem: {what}");
        if [429, 503].contains(&status) {
            assert!(answer.headers.contains_key("retry-after"), "{what}");
        }
    }
    let Some(operation) = operation(&DOCUMENT, method, path) else {
        return;
    };
    let response = &operation["responses"][status.to_string()];
    assert!(response.is_object(), "undocumented status: {what}");
    let Some(media_type) = media_type else { return };
    assert!(
        response["content"][media_type].is_object(),
        "undocumented type {media_type}: {what}"
    );
}

#[test]
fn the_document_has_the_paths_methods_and_roles_of_the_table() {
    let document = document();
    let found = operations(&document)
        .into_iter()
        .map(|(path, method, operation)| {
            let role = operation["x-quorate-role"].as_str().unwrap();
            (
                path.to_owned(),
                method.to_ascii_uppercase(),
                role.to_owned(),
            )
        });
    let expected = ROUTES.iter().flat_map(|route| {
        route.calls.iter().map(|call| {
            let role = match call.permission {
                Permission::Open => "none",
                other => other.role().name(),
            };
            (
                route.path.to_owned(),
                call.method.to_string(),
                role.to_owned(),
            )
        })
    });
    let (found, expected): (BTreeSet<_>, BTreeSet<_>) = (found.collect(), expected.collect());
    assert_eq!(found, expected);
    assert!(found.len() > 50);
}

#[test]
fn operation_ids_are_unique_and_references_resolve() {
    let document = document();
    let operations = operations(&document);
    let ids = operations
        .iter()
        .map(|(_, _, operation)| operation["operationId"].as_str());
    let ids: BTreeSet<_> = ids.collect();
    assert_eq!(ids.len(), operations.len());
    let text = String::from_utf8(API.text.to_vec()).unwrap();
    let mut used = BTreeSet::new();
    for reference in text.split("\"$ref\": \"").skip(1) {
        let reference = reference.split('"').next().unwrap();
        let pointer = reference
            .strip_prefix('#')
            .unwrap_or_else(|| panic!("{reference}"));
        assert!(document.pointer(pointer).is_some(), "{reference}");
        used.insert(pointer.rsplit('/').next().unwrap().to_owned());
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let all: BTreeSet<_> = schemas.keys().cloned().collect();
    assert_eq!(used, all, "some schemas are used by nothing");
}

#[test]
fn every_list_has_pages_and_every_resource_a_version() {
    let document = document();
    for (path, method, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap();
        let parameters = operation["parameters"].as_array().unwrap();
        let has = |name: &str| parameters.iter().any(|it| it["name"] == name);
        if id.starts_with("list") {
            assert!(has("limit") && has("cursor"), "{path}");
        }
        // Objects that can be read and put return their version, which writes can require.
        let is_put = document["paths"][path]["put"].is_object();
        if is_put && method == "get" {
            assert!(
                operation["responses"]["200"]["headers"]["ETag"].is_object(),
                "{path}"
            );
        }
        if is_put && (method == "put" || method == "delete") {
            assert!(has("If-Match"), "{method} {path}");
            assert!(operation["responses"]["412"].is_object(), "{method} {path}");
        }
    }
}

/// Returns the first example of a schema, or of the one that it refers to.
fn example<'a>(document: &'a Value, schema: &'a Value) -> Option<&'a Value> {
    let referred = schema["$ref"].as_str();
    let schema = referred.map_or(schema, |it| document.pointer(&it[1..]).unwrap());
    schema["examples"].as_array().map(|all| &all[0])
}

#[tokio::test]
async fn examples_are_accepted_and_match_responses() {
    let document = document();
    let mut shown = BTreeSet::new();
    for (path, method, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap();
        let json = "application/json";
        let content = &operation["requestBody"]["content"][json];
        assert_eq!(content["example"], content["schema"]["examples"][0], "{id}");
        let body = example(&document, &content["schema"]);
        let expected = example(
            &document,
            &operation["responses"]["200"]["content"][json]["schema"],
        );
        // Examples cannot name existing objects.
        let is_named = path.contains('{') || method == "delete";
        if is_named || (body.is_none() && expected.is_none()) {
            continue;
        }
        let bench = Bench::with_backends();
        let method = method.to_uppercase();
        let body = body.map_or_else(String::new, Value::to_string);
        let answer = bench.call(&method, path, &body).await;
        assert!(
            answer.status.is_success(),
            "{method} {path} {body}: {}",
            answer.body
        );
        if let Some(expected) = expected {
            let keys =
                |it: &Value| -> Vec<String> { it.as_object().unwrap().keys().cloned().collect() };
            assert_eq!(keys(&answer.json()), keys(expected), "{method} {path}");
        }
        shown.insert(id.to_owned());
    }
    for id in [
        "putPolicy",
        "getPolicy",
        "putRouting",
        "getRouting",
        "putAdmission",
        "getAdmission",
        "putLogLevel",
        "getLogLevel",
        "startRecording",
        "getRecordings",
        "whatIf",
    ] {
        assert!(shown.contains(id), "{id} has no example: {shown:?}");
    }
}

#[tokio::test]
async fn the_document_is_served() {
    let bench = Bench::new();
    assert_eq!(bench.get("/admin/v1/openapi.json").await, document());
}

/// Writes docs/reference/admin-api.md: `UPDATE_EXPECT=1 cargo test -p admin reference`.
#[test]
fn the_reference_lists_every_call() {
    expect_file!["../../../../docs/reference/admin-api.md"].assert_eq(&reference(&document()));
}

fn reference(document: &Value) -> String {
    let mut page = String::from(
        "# Admin API\n\n\
         Made from `GET /admin/v1/openapi.json` by `UPDATE_EXPECT=1 cargo test -p admin reference`; \
         do not edit.\nThe document has the schema of every body and answer.\n\n",
    );
    page += &by_line(document["info"]["description"].as_str().unwrap());
    page += "\n";
    for tag in document["tags"].as_array().unwrap() {
        let (name, what) = (
            tag["name"].as_str().unwrap(),
            tag["description"].as_str().unwrap(),
        );
        write!(page, "\n## {name}\n\n{what}\n").unwrap();
        for (path, method, operation) in operations(document) {
            if operation["tags"][0] == *name {
                page += &section(path, method, operation);
            }
        }
    }
    page += "\n## Problems\n\n| type | status | when |\n| --- | --- | --- |\n";
    for kind in document["x-quorate-problems"].as_array().unwrap() {
        let (name, what) = (
            kind["type"].as_str().unwrap(),
            kind["description"].as_str().unwrap(),
        );
        writeln!(page, "| `{name}` | {} | {what} |", kind["status"]).unwrap();
    }
    page
}

/// Puts each sentence on a line of its own, as in the other pages.
fn by_line(text: &str) -> String {
    text.replace(". ", ".\n")
}

fn section(path: &str, method: &str, operation: &Value) -> String {
    let method = method.to_ascii_uppercase();
    let what = operation["description"]
        .as_str()
        .unwrap()
        .replace("\n\n", "\n");
    let mut section = format!("\n### {method} {path}\n\n{what}\n");
    let parameters = operation["parameters"].as_array().unwrap();
    let shown = parameters.iter().filter(|it| it["in"] != "path");
    let mut lines = String::new();
    for parameter in shown {
        let (name, place) = (
            parameter["name"].as_str().unwrap(),
            parameter["in"].as_str().unwrap(),
        );
        let what = parameter["description"].as_str().unwrap_or_default();
        let (what, place) = (
            what.replace('\n', " "),
            if place == "query" { "key" } else { place },
        );
        writeln!(lines, "| `{name}` | {place} | {what} |").unwrap();
    }
    if !lines.is_empty() {
        section += "\n| parameter | | what |\n| --- | --- | --- |\n";
        section += &lines;
    }
    if let Some(content) = operation["requestBody"]["content"].as_object() {
        let types: Vec<_> = content
            .iter()
            .map(|(name, it)| shown_type(name, &it["schema"]))
            .collect();
        writeln!(section, "\nBody: {}", types.join(", ")).unwrap();
    }
    let responses = operation["responses"].as_object().unwrap();
    let mut failed = Vec::new();
    for (status, response) in responses {
        let content = response["content"].as_object().unwrap();
        for (name, it) in content {
            match it["examples"].as_object() {
                Some(kinds) => {
                    let kinds = kinds.keys().map(|kind| format!("`{kind}`"));
                    failed.push(format!("{status} {}", kinds.collect::<Vec<_>>().join(", ")));
                }
                None => {
                    let what = shown_type(name, &it["schema"]);
                    writeln!(section, "\nAnswers {status}: {what}").unwrap();
                }
            }
        }
    }
    writeln!(section, "\nProblems: {}.", failed.join("; ")).unwrap();
    section
}

fn shown_type(media_type: &str, schema: &Value) -> String {
    let all = schema["anyOf"].as_array().into_iter().flatten();
    let mut schemas = all.chain([schema]).filter_map(|it| it["$ref"].as_str());
    let name = schemas.next().and_then(|it| it.rsplit('/').next());
    match name {
        Some(name) => format!("`{name}`"),
        None => format!("`{media_type}`"),
    }
}
