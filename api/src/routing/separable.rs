//! What of a request two engines can do, and in which way they hand it over.

use state::policy::Handover;

/// Which stages of a request can be at two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStages {
    /// Prompt and answer, however the engines hand over.
    Apart,
    /// The same where engines meet in rooms: they do with several prompts and answers, and with
    /// prompts that are not looked up in the prefix cache.
    ApartByRoom,
    /// None: one engine does all of it.
    Whole,
    /// There is nothing to compute: whichever engine is asked knows it.
    Nothing,
}

impl RequestStages {
    /// Whether two engines can share it that hand over in this way.
    #[must_use]
    pub(super) fn are_handed_over(self, by: Handover) -> bool {
        match self {
            Self::Apart => true,
            Self::ApartByRoom => by == Handover::Room,
            Self::Whole | Self::Nothing => false,
        }
    }
}
