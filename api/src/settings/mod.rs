//! Settings as operators write them. A config file and the admin API use the same keys and value
//! formats.
//!
//! A [`Form`](state::form::Form) is the string format of a type that TOML and JSON lack, such as a duration. Schemas,
//! generated from structs, define the keys and their valid values. Validation against a schema
//! reports every fault of a document with its key, the value found and the values expected. A
//! listing contains the replicated settings by key, for the comparison of a config file with a
//! cluster.

mod form;
mod listing;
mod read;
mod schema;

pub use form::{DiskSpace, Size, Status, UrlPath, named};
pub use listing::{
    Difference, FileSettings, LocalSetting, ReplicatedSettings, SettingKey, SettingValues,
    SharedFileSettings, differences, in_effect, url_of,
};
pub use read::{misfit, read_admission, read_user, read_user_defaults};
pub use schema::{
    SettingError, expected, fit, join, properties, required, schema_of, simplify, table, valid_part,
};
