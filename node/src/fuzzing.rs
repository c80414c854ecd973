//! Fuzz targets: functions that read untrusted bytes and must not panic on any input, such as
//! messages of peers, configs and responses of the admin API. Used by `chaos-tests`.

pub use crate::app::fuzzing::{exchange, exchange_seeds};
pub use crate::cli::fuzzing::{admin_answer, admin_answer_seeds};
pub use crate::config::fuzzing::{config, config_seeds};
pub use crate::config::import::fuzzing::{import, import_seeds};
