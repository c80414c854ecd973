//! JSON Schemas of the types in requests and responses, as OpenAPI 3.1 uses them.
//!
//! A field may be optional in a request although responses always contain it. Requests and
//! responses therefore have separate schemas. If those of a type differ, the request's is named
//! `...Input`.

use std::collections::BTreeSet;

use schemars::generate::SchemaSettings;
use schemars::transform::ReplaceBoolSchemas;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

use super::ParameterShape;
use super::forms::{merge_words, name_objects};
use api::error::Problem;

/// Prefix of references to schemas in the document.
const AT: &str = "#/components/schemas/";
/// Prefix of references to request schemas until [`RequestNames::settle`] replaces it. Their final
/// names are known only after all schemas have been collected.
const TAKEN: &str = "#/taken/";

/// Collector of the schemas that calls refer to.
pub(crate) struct Schemas {
    response: SchemaGenerator,
    request: SchemaGenerator,
}

impl Schemas {
    pub(crate) fn new() -> Self {
        let settings = |at: &'static str| {
            let mut booleans = ReplaceBoolSchemas::default();
            booleans.skip_additional_properties = true;
            SchemaSettings::draft2020_12().with(|settings| {
                settings.definitions_path = at.trim_start_matches('#').trim_end_matches('/').into();
                settings.meta_schema = None;
                settings.transforms.push(Box::new(booleans));
            })
        };
        Self {
            response: settings(AT).for_serialize().into_generator(),
            request: settings(TAKEN).for_deserialize().into_generator(),
        }
    }

    /// Returns a reference to the response schema of `T`, or the schema itself if it has no name.
    pub(super) fn response<T: JsonSchema>(&mut self) -> Value {
        self.response.subschema_for::<T>().to_value()
    }

    /// Returns the schema of a problem, the body of every error response.
    pub(crate) fn response_problem(&mut self) -> Value {
        self.response::<Problem>()
    }

    /// Returns a reference to the request schema of `T`, or the schema itself if it has no name.
    pub(super) fn request<T: JsonSchema>(&mut self) -> Value {
        self.request.subschema_for::<T>().to_value()
    }

    /// Returns the fields of `T` as query keys.
    pub(super) fn keys<T: JsonSchema>() -> Vec<ParameterShape> {
        let settings = SchemaSettings::draft2020_12()
            .for_deserialize()
            .with(|settings| settings.inline_subschemas = true);
        let schema = settings.into_generator().into_root_schema_for::<T>();
        let required = schema.get("required").and_then(Value::as_array);
        let is_required = |name: &str| {
            let mut required = required.into_iter().flatten();
            required.any(|it| it.as_str() == Some(name))
        };
        let fields = schema.get("properties").and_then(Value::as_object);
        let fields = fields.into_iter().flatten();
        fields
            .map(|(name, schema)| {
                let mut schema = without_null(schema.clone());
                merge_words(&mut schema);
                ParameterShape {
                    name: name.clone(),
                    is_required: is_required(name),
                    schema,
                }
            })
            .collect()
    }

    /// Returns all schemas by name, and the final names of the request schemas.
    pub(crate) fn named(mut self) -> (Map<String, Value>, RequestNames) {
        let mut response = self.response.take_definitions(true);
        let request = self.request.take_definitions(true);
        let names = RequestNames::of(&response, &request);
        for (name, mut schema) in request {
            names.settle(&mut schema);
            response.insert(names.name(&name), schema);
        }
        response.values_mut().for_each(merge_words);
        name_objects(&mut response);
        response.sort_keys();
        (response, names)
    }
}

/// Removes null and the default from the schema of a query key: a query omits a key without a
/// value.
fn without_null(mut schema: Value) -> Value {
    if let Some(types) = schema["type"].as_array() {
        let left: Vec<Value> = types.iter().filter(|it| *it != "null").cloned().collect();
        if let [only] = left.as_slice() {
            schema["type"] = only.clone();
        }
    }
    if let Some(schema) = schema.as_object_mut() {
        schema.remove("default");
    }
    schema
}

/// Names of the types whose request schema differs from their response schema.
pub(crate) struct RequestNames(BTreeSet<String>);

impl RequestNames {
    fn of(response: &Map<String, Value>, request: &Map<String, Value>) -> Self {
        let as_given = |schema: &Value| {
            let text = schema.to_string().replace(TAKEN, AT);
            serde_json::from_str::<Value>(&text).expect("it was JSON before")
        };
        let differs = |(name, schema): &(&String, &Value)| {
            response
                .get(*name)
                .is_some_and(|response| *response != as_given(schema))
        };
        let mut names: BTreeSet<String> = request
            .iter()
            .filter(differs)
            .map(|(name, _)| name.clone())
            .collect();
        loop {
            // A request schema that refers to one of these differs too.
            let refers = |schema: &Value| {
                let text = schema.to_string();
                names
                    .iter()
                    .any(|name| text.contains(&format!("{TAKEN}{name}\"")))
            };
            let further: Vec<String> = request
                .iter()
                .filter(|(name, schema)| {
                    response.contains_key(*name) && !names.contains(*name) && refers(schema)
                })
                .map(|(name, _)| name.clone())
                .collect();
            if further.is_empty() {
                return Self(names);
            }
            names.extend(further);
        }
    }

    fn name(&self, name: &str) -> String {
        match self.0.contains(name) {
            true => format!("{name}Input"),
            false => name.to_owned(),
        }
    }

    /// Replaces all references to request schemas within `schema` by references into the document.
    pub(crate) fn settle(&self, schema: &mut Value) {
        match schema {
            Value::Object(fields) => {
                for (field, value) in fields {
                    let referred = match value {
                        Value::String(text) if field == "$ref" => text.strip_prefix(TAKEN),
                        _ => None,
                    };
                    match referred {
                        Some(name) => *value = format!("{AT}{}", self.name(name)).into(),
                        None => self.settle(value),
                    }
                }
            }
            Value::Array(all) => all.iter_mut().for_each(|it| self.settle(it)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}
