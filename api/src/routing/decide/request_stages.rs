//! Whether prefill and decode of a request can run on two engines, and with which handover.

use state::policy::Handover;

/// Whether prefill and decode of a request can run on two engines, and with which handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStages {
    /// Two engines can share the request, with any handover.
    Disaggregatable,
    /// Two engines can share the request only if they meet in rooms. That handover supports several
    /// prompts or choices, and prompts that skip the prefix cache.
    BootstrapRoom,
    /// One engine must serve the whole request.
    Monolithic,
    /// The request has nothing to compute, so any engine can answer it.
    Nothing,
}

impl RequestStages {
    /// Whether two engines with the handover `by` can share the request.
    #[must_use]
    pub(super) fn are_handed_over(self, by: Handover) -> bool {
        match self {
            Self::Disaggregatable => true,
            Self::BootstrapRoom => by == Handover::Room,
            Self::Monolithic | Self::Nothing => false,
        }
    }
}
