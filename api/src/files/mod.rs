//! Files of this replica: backups, recordings, rings of frames, and the detection of changed files.

pub mod backup;
pub mod file_stamp;
pub mod recording;
pub mod ring;
pub mod text;
