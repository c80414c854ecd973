//! Who holds how many entries of a bounded table.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::UserKey;

/// Number of entries of each user who has any.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldCounts {
    held: BTreeMap<UserKey, usize>,
    /// The same, by number.
    by_held: BTreeSet<(usize, UserKey)>,
}

impl HeldCounts {
    /// Counts an entry more.
    pub(crate) fn add(&mut self, user: UserKey) {
        self.change(user, |held| held + 1);
    }

    /// Counts an entry less.
    pub(crate) fn remove(&mut self, user: UserKey) {
        self.change(user, |held| held.saturating_sub(1));
    }

    /// Returns the user with the most entries if they are at least `share`.
    pub(crate) fn most(&self, share: usize) -> Option<UserKey> {
        let (held, user) = self.by_held.last()?;
        (*held >= share).then_some(*user)
    }

    fn change(&mut self, user: UserKey, change: impl FnOnce(usize) -> usize) {
        let before = self.held.remove(&user).unwrap_or(0);
        let after = change(before);
        self.by_held.remove(&(before, user));
        if after > 0 {
            self.held.insert(user, after);
            self.by_held.insert((after, user));
        }
    }
}
