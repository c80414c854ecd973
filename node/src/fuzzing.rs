//! Fuzz targets: readers of untrusted bytes as functions that must not panic, whatever their input:
//! messages of peers, config, answers of the admin API. Used by `chaos-tests`.

pub use crate::app::fuzzing::{exchange, exchange_seeds};
pub use crate::cli::fuzzing::{admin_answer, admin_answer_seeds};
pub use crate::config::fuzzing::{config, config_seeds};
