//! How operators write settings: the keys of a config file and of the admin API, which are the same.
//!
//! A format ([`Form`]) is how a value is written that neither TOML nor JSON has a type for, such as a
//! duration. A schema made from structs says which keys there are and which values they take; it
//! finds every fault of a document, and names key, value and what was expected. A listing has the
//! replicated settings by key, so that a file can be compared with a cluster.

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
