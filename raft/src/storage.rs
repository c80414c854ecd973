//! Where a replica keeps its data: on disk, or in memory for tests and simulations.

use std::path::Path;
use std::sync::Arc;

use crate::determinism::blocking::BlockingMode;
use crate::error::StartError;
use crate::fault::FatalError;
use crate::files::{Layout, io_error};
use crate::log::LogStore;
use crate::memory::MemoryDisk;

/// Kind of storage for the log, identity and snapshots.
#[derive(Debug, Clone, Default)]
pub enum Storage {
    /// Storage on disk below the data directory, with the log in sled. Everything is synced before
    /// it is acknowledged.
    #[default]
    Sled,
    /// Storage in memory, for tests and simulations. The contents survive a restart of the replica
    /// with the same disk. Nothing is written below the data directory, and blocking work runs in
    /// place.
    Memory(MemoryDisk),
}

impl Storage {
    /// Returns where blocking work runs.
    pub(crate) fn blocking(&self) -> BlockingMode {
        match self {
            Self::Sled => BlockingMode::Pool,
            Self::Memory(_) => BlockingMode::InPlace,
        }
    }

    /// Returns the layout of the files below `data_dir`.
    pub(crate) fn layout(&self, data_dir: &Path) -> Layout {
        match self {
            Self::Sled => Layout::new(data_dir),
            Self::Memory(disk) => Layout::over(Arc::new(disk.open()), data_dir),
        }
    }

    /// Opens the log and checks every entry. Blocks.
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
                let log = contents.and_then(|contents| {
                    LogStore::over(Arc::new(disk), contents, fault, self.blocking())
                });
                log.map_err(|error| io_error(&layout.log(), error))
            }
        }
    }
}
