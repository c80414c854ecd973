//! Files of this replica: backups, recordings, and the detection of changed files.

pub mod backup;
pub mod file_stamp;
pub mod recording;
pub mod text;
