//! Readers of foreign bytes as functions that must not panic, whatever they are given: messages of
//! peers, config, answers of the admin API. For the fuzz targets of `chaos-tests`.

pub use crate::app::fuzzing::{exchange, exchange_seeds};
pub use crate::cli::fuzzing::{admin_answer, admin_answer_seeds};
pub use crate::config::fuzzing::{config, config_seeds};
