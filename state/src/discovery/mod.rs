//! Backends listed by a source: a DNS name, a file, Kubernetes.
//!
//! The log records which source registered a backend, and since when that source no longer lists
//! it. So a source never changes backends of operators, and a new leader continues where the last
//! one stopped. [`SourcePlan`] determines the changes from the source's response, the cluster's
//! backends, and the time.

mod plan;
mod table;

use bincode::{Decode, Encode};

use crate::backends::BackendSpec;
use crate::reject::Rejection;
use crate::validate::{ensure, is_name, is_plain};

pub use crate::validate::is_id_char;
pub use plan::{EngineCondition, KnownFleet, ListedEngine, RefusedEngine, SourcePlan, SourceRules};
pub(crate) use table::Discovered;
pub use table::{DiscoveredBackend, LostBackend};

/// Maximum length of a source's id, in bytes. It is part of the ids of its backends.
pub const SOURCE_ID_BYTES_MAX: usize = 64;

/// A change of one backend that a source requests.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Discovery {
    /// Id of the source. A source can only change backends that it registered.
    pub source: String,
    /// The requested change.
    pub change: DiscoveryChange,
}

/// Change of one backend, as requested by its source.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum DiscoveryChange {
    /// The source lists the backend as ready: it is registered or updated, and no longer lost.
    Found(BackendSpec),
    /// The source does not list the backend, or not as ready: it drains.
    Lost {
        /// Id of the backend.
        name: String,
    },
    /// The backend was lost for long enough: it is removed, with everything that it owns.
    Forgotten {
        /// Id of the backend.
        name: String,
    },
}

impl DiscoveryChange {
    /// Returns the id of the backend that changes.
    #[must_use]
    pub fn backend(&self) -> &str {
        match self {
            Self::Found(spec) => &spec.id,
            Self::Lost { name } | Self::Forgotten { name } => name,
        }
    }
}

impl Discovery {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(
            is_source(&self.source),
            "source",
            "1 to 64 characters of [A-Za-z0-9._-]",
        )?;
        match &self.change {
            DiscoveryChange::Found(spec) => spec.validate(),
            DiscoveryChange::Lost { name } | DiscoveryChange::Forgotten { name } => {
                ensure(is_name(name), "name", "1 to 256 bytes")
            }
        }
    }
}

/// Whether `id` is a valid source id.
#[must_use]
pub fn is_source(id: &str) -> bool {
    (1..=SOURCE_ID_BYTES_MAX).contains(&id.len()) && is_plain(id)
}
