//! Where a replica keeps its data, and what follows from that.

use std::path::Path;
use std::sync::Arc;

use crate::determinism::blocking::BlockingMode;
use crate::error::StartError;
use crate::fault::FatalError;
use crate::files::{Layout, io_error};
use crate::log::LogStore;
use crate::memory::MemoryDisk;

/// Where log, identity and snapshots are kept.
#[derive(Debug, Clone, Default)]
pub enum Storage {
    /// The log in sled, all of it below the data directory, synced before anything is answered.
    #[default]
    Sled,
    /// In memory, for tests and simulation, with identity and snapshots: it survives a restart of
    /// the replica that is given the same disk. Nothing is written below the data directory, and
    /// what blocks is done in place.
    Memory(MemoryDisk),
}

impl Storage {
    /// How work that blocks is done there.
    pub(crate) fn blocking(&self) -> BlockingMode {
        match self {
            Self::Sled => BlockingMode::Pool,
            Self::Memory(_) => BlockingMode::InPlace,
        }
    }

    /// The files below `data_dir`.
    pub(crate) fn layout(&self, data_dir: &Path) -> Layout {
        match self {
            Self::Sled => Layout::new(data_dir),
            Self::Memory(disk) => Layout::over(Arc::new(disk.open()), data_dir),
        }
    }

    /// Opens the log and checks all of it. Blocks.
    pub(crate) fn open_log(
        &self,
        layout: &Layout,
        fault: FatalError,
    ) -> Result<LogStore, StartError> {
        match self {
            Self::Sled => LogStore::on_sled(layout, fault),
            Self::Memory(disk) => {
                let disk = disk.open();
                let contents = disk.contents();
                let contents = contents.map_err(|error| io_error(&layout.log(), error))?;
                Ok(LogStore::in_memory(Arc::new(disk), contents, fault))
            }
        }
    }
}
