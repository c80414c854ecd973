//! Settings as operators write them. A config file and the admin API use the same keys and value
//! formats.
//!
//! A [`Form`] is the string format of a type that TOML and JSON lack, such as a duration. Schemas,
//! generated from structs, define the keys and their valid values. Validation against a schema
//! reports every fault of a document with its key, the value found and the values expected. A
//! listing contains the replicated settings by key, for the comparison of a config file with a
//! cluster.

mod admission;
mod form;
mod listing;
mod schema;
mod users;

pub use admission::{
    AdmissionForm, SlaForm, UserLimitsForm, are_former_limits, is_former, read_budget,
};
pub use form::{
    Bounds, Form, FormLookup, LongSpan, LongSpanOrZero, NamedForm, Parsed, Slots, Span, SpanOrZero,
    first, is_span, ms, named, show_duration, span,
};
pub use listing::{
    Difference, FileSettings, LocalSetting, ReplicatedSettings, SettingKey, SettingValues,
    SharedFileSettings, differences, in_effect, url_of,
};
pub use schema::{
    SettingError, expected, fit, join, properties, required, schema_of, simplify, table, valid_part,
};
pub use users::{DefaultCache, UserDefaultsForm};
