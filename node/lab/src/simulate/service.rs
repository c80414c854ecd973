//! Service per user, and the service gap between users who both have requests waiting.
//!
//! Service is defined as in VTC: input price times computed prompt tokens plus output price times
//! output tokens, divided by the user's weight. It counts when the engine has done the work. If a
//! client leaves before the first token, the prompt tokens charged to its user count, because no
//! engine reports how many were computed. The *gap* of two users is the largest difference in
//! service over any period in which both had requests waiting throughout (Sheng et al. 2024,
//! definition 4.1). It is computed per pair as the range of the difference of both totals.

use state::users::FairnessSettings;

/// Maximum number of users for which gaps are computed.
pub const GAP_USERS_MAX: usize = 64;

/// Service accounts of all users, with the service gaps between pairs of users.
#[derive(Debug, Clone, Default)]
pub struct ServiceAccounts {
    prices: FairnessSettings,
    accounts: Vec<UserAccount>,
    /// Least and greatest difference in service of each pair of users, while both wait.
    pairs: Vec<Option<(i64, i64)>>,
    gap: i64,
    /// Whether the measured period is over.
    is_closed: bool,
}

#[derive(Debug, Clone)]
struct UserAccount {
    weight_milli: u32,
    priced: u64,
    waiting: u32,
    /// Whether the user has always had a request waiting since the watch began.
    was_always_waiting: bool,
    /// Service of the user when the watch began.
    before: i64,
}

impl UserAccount {
    /// Returns the user's service, in thousandths of a priced token at weight 1.
    fn normalised(&self) -> i64 {
        let milli = u128::from(self.priced) * 1_000_000 / u128::from(self.weight_milli.max(1));
        i64::try_from(milli).unwrap_or(i64::MAX)
    }
}

impl ServiceAccounts {
    /// Creates empty accounts for users with these weights, in thousandths.
    #[must_use]
    pub fn new(prices: FairnessSettings, weights_milli: impl Iterator<Item = u32>) -> Self {
        let account = |weight_milli| UserAccount {
            weight_milli,
            priced: 0,
            waiting: 0,
            was_always_waiting: false,
            before: 0,
        };
        let accounts: Vec<UserAccount> = weights_milli.map(account).collect();
        let kept = if accounts.len() <= GAP_USERS_MAX {
            accounts.len()
        } else {
            0
        };
        Self {
            prices,
            pairs: vec![None; kept * kept],
            accounts,
            gap: 0,
            is_closed: false,
        }
    }

    /// Starts the watch on users who always have requests waiting.
    pub fn watch(&mut self) {
        for account in &mut self.accounts {
            account.was_always_waiting = account.waiting > 0;
            account.before = account.normalised();
        }
    }

    /// Ends the measured period. Later service does not count.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    /// Returns the number of users.
    #[must_use]
    pub fn users(&self) -> usize {
        self.accounts.len()
    }

    /// Returns `priced` tokens divided by the weight of `user`, in thousandths at weight 1.
    #[must_use]
    pub fn weighed(&self, user: usize, priced: u64) -> u64 {
        let weight_milli = self.accounts[user].weight_milli.max(1);
        let milli = u128::from(priced) * 1_000_000 / u128::from(weight_milli);
        u64::try_from(milli).unwrap_or(u64::MAX)
    }

    /// Returns the price of `uncached` prompt tokens and `output` output tokens.
    #[must_use]
    pub fn price(&self, uncached: u32, output: u32) -> u64 {
        u64::from(uncached) * u64::from(self.prices.input_price)
            + u64::from(output) * u64::from(self.prices.output_price)
    }

    /// Records that `user` was served `uncached` prompt tokens and `output` output tokens.
    pub fn served(&mut self, user: usize, uncached: u32, output: u32) {
        if self.is_closed {
            return;
        }
        let priced = self.price(uncached, output);
        self.accounts[user].priced += priced;
        if self.pairs.is_empty() || self.accounts[user].waiting == 0 {
            return;
        }
        for other in 0..self.accounts.len() {
            if other != user && self.accounts[other].waiting > 0 {
                self.note(user, other);
            }
        }
    }

    /// Records that one more request of `user` waits.
    pub fn waits(&mut self, user: usize) {
        if self.is_closed {
            return;
        }
        self.accounts[user].waiting += 1;
        if self.accounts[user].waiting > 1 || self.pairs.is_empty() {
            return;
        }
        for other in 0..self.accounts.len() {
            if other != user && self.accounts[other].waiting > 0 {
                self.note(user, other);
            }
        }
    }

    /// Records that one fewer request of `user` waits.
    pub fn waits_no_more(&mut self, user: usize) {
        if self.is_closed {
            return;
        }
        let account = &mut self.accounts[user];
        account.waiting = account.waiting.saturating_sub(1);
        if account.waiting > 0 {
            return;
        }
        account.was_always_waiting = false;
        for other in 0..self.kept() {
            let pair = self.pair(user, other);
            self.pairs[pair] = None;
        }
    }

    fn note(&mut self, one: usize, other: usize) {
        let (first, second) = (one.min(other), one.max(other));
        let difference = self.accounts[first].normalised() - self.accounts[second].normalised();
        let pair = self.pair(first, second);
        let (least, greatest) = self.pairs[pair].unwrap_or((difference, difference));
        let range = (least.min(difference), greatest.max(difference));
        self.gap = self.gap.max(range.1 - range.0);
        self.pairs[pair] = Some(range);
    }

    fn kept(&self) -> usize {
        if self.pairs.is_empty() {
            0
        } else {
            self.accounts.len()
        }
    }

    fn pair(&self, one: usize, other: usize) -> usize {
        one.min(other) * self.accounts.len() + one.max(other)
    }

    /// Returns the largest gap of any two users so far, in priced tokens at weight 1; `None` with
    /// more than [`GAP_USERS_MAX`] users.
    #[must_use]
    pub fn gap(&self) -> Option<f64> {
        (!self.pairs.is_empty()).then(|| self.gap as f64 / 1000.0)
    }

    /// Returns each user's service so far, in priced tokens at weight 1.
    #[must_use]
    pub fn shares(&self) -> Vec<f64> {
        let share = |account: &UserAccount| account.normalised() as f64 / 1000.0;
        self.accounts.iter().map(share).collect()
    }

    /// Returns the service of `user`, in thousandths of a priced token at weight 1.
    #[must_use]
    pub fn milli(&self, user: usize) -> u64 {
        u64::try_from(self.accounts[user].normalised()).unwrap_or(0)
    }

    /// Returns the service since the watch began of each user who has always had requests waiting,
    /// in priced tokens at weight 1.
    #[must_use]
    pub fn shares_of_always_waiting(&self) -> Vec<f64> {
        let share = |account: &UserAccount| (account.normalised() - account.before) as f64 / 1000.0;
        let always = self.accounts.iter().filter(|it| it.was_always_waiting);
        always.map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::report::jain_index;

    fn service(weights: &[u32]) -> ServiceAccounts {
        ServiceAccounts::new(FairnessSettings::default(), weights.iter().copied())
    }

    #[test]
    fn service_gaps_count_while_both_users_wait() {
        let mut books = service(&[1000, 1000]);
        books.served(0, 1000, 0);
        assert_eq!(books.gap(), Some(0.0), "nobody waits");
        books.waits(0);
        books.waits(1);
        books.watch();
        books.served(0, 10, 0);
        books.served(1, 0, 15);
        assert_eq!(books.gap(), Some(30.0), "up by 10, then down by 30");
        books.waits_no_more(1);
        books.served(0, 500, 0);
        books.waits(1);
        books.served(0, 20, 0);
        assert_eq!(books.gap(), Some(30.0), "a new stretch begins at 0");
        assert_eq!(books.shares_of_always_waiting(), [530.0]);
        books.close();
        books.served(0, 20, 0);
        assert_eq!(books.shares(), [1530.0, 30.0], "the time is over");
    }

    #[test]
    fn weights_divide_service() {
        let mut books = service(&[1000, 4000]);
        books.waits(0);
        books.waits(1);
        books.served(0, 100, 0);
        books.served(1, 400, 0);
        assert_eq!(books.shares(), [100.0, 100.0]);
        assert_eq!(books.gap(), Some(100.0));
        assert_eq!(jain_index(&books.shares()), Some(1.0));
    }
}
