//! Identity of users: names, API keys of the cluster, and the salts that isolate their cached
//! blocks.

pub mod api_keys;
pub mod isolation;
pub(super) mod user_name;
