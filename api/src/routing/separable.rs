//! Which stages of a request can run on two engines, and by which handover.

use state::policy::Handover;

/// Which stages of a request can run on two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStages {
    /// Prompt and response, with any handover.
    Apart,
    /// Prompt and response, but only if the engines meet in rooms. This handover covers several
    /// prompts or choices, and prompts that skip the prefix cache.
    ApartByRoom,
    /// None: one engine serves the whole request.
    Whole,
    /// Nothing to compute: any engine can answer.
    Nothing,
}

impl RequestStages {
    /// Whether two engines with this handover can share the request.
    #[must_use]
    pub(super) fn are_handed_over(self, by: Handover) -> bool {
        match self {
            Self::Apart => true,
            Self::ApartByRoom => by == Handover::Room,
            Self::Whole | Self::Nothing => false,
        }
    }
}
