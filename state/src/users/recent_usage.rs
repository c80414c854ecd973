//! Recent usage of users, maintained only while a policy needs it.
//!
//! The hot path reads a frozen copy of the user table, published after each command. The lowest and
//! highest usage come from a scan over the users active within the window, with a bounded number of
//! users per command. With up to [`ROUND_USERS`] active users they are exact. With more, they lag
//! by as many commands as a scan takes.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::UserUsage;
use super::map::UserMap;
use super::user::User;
use crate::ids::UserKey;
use crate::policy::{UserTokens, VtcBasicSettings};

/// Maximum number of users scanned per command.
const ROUND_USERS: usize = 2048;

/// Scan that finds the extremes of usage among the active users, a part per command.
pub(super) struct UsageScan {
    /// Users who may have used something within the window.
    active: BTreeSet<UserKey>,
    /// Last user scanned; `None` at the start of a round.
    last: Option<UserKey>,
    /// Extremes found so far in the current round.
    found: Extremes,
    /// Extremes of the last complete round.
    known: Extremes,
}

/// Lowest and highest weighted tokens, ignoring users without any.
#[derive(Debug, Clone, Copy, Default)]
struct Extremes {
    least_milli: Option<u64>,
    most_milli: Option<u64>,
}

impl Extremes {
    fn take(&mut self, tokens_milli: u64) {
        let least = self.least_milli.unwrap_or(u64::MAX);
        self.least_milli = Some(least.min(tokens_milli));
        self.most_milli = self.most_milli.max(Some(tokens_milli));
    }
}

impl UsageScan {
    /// Starts a scan of the users in `map`, each of which counts as active until scanned.
    pub(super) fn over(map: &UserMap) -> Self {
        Self {
            active: map.iter().map(|(key, _)| *key).collect(),
            last: None,
            found: Extremes::default(),
            known: Extremes::default(),
        }
    }

    pub(super) fn charged(&mut self, user: UserKey) {
        self.active.insert(user);
    }

    /// Scans up to [`ROUND_USERS`] further users.
    pub(super) fn go_on(&mut self, users: &RecentUsage) {
        let from = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let mut idle = Vec::new();
        let mut next = self.active.range((from, Bound::Unbounded));
        let mut looked_at = 0;
        let is_over = loop {
            if looked_at == ROUND_USERS {
                break false;
            }
            let Some(&key) = next.next() else {
                break true;
            };
            match users.tokens_milli(key) {
                0 => idle.push(key),
                tokens_milli => self.found.take(tokens_milli),
            }
            self.last = Some(key);
            looked_at += 1;
        };
        for key in idle {
            self.active.remove(&key);
        }
        if is_over {
            self.known = std::mem::take(&mut self.found);
            self.last = None;
        }
    }

    /// Copies the extremes of the last complete round to `recent_usage`.
    pub(super) fn tell(&self, recent_usage: &mut RecentUsage) {
        recent_usage.extremes = self.known;
    }
}

/// Frozen view of the users' usage within the window.
pub struct RecentUsage {
    map: UserMap,
    now_ms: u64,
    bucket_ms: u64,
    input_weight_milli: u32,
    output_weight_milli: u32,
    extremes: Extremes,
}

impl RecentUsage {
    pub(super) fn of(
        map: UserMap,
        now_ms: u64,
        bucket_ms: u64,
        settings: &VtcBasicSettings,
    ) -> Self {
        Self {
            map,
            now_ms,
            bucket_ms,
            input_weight_milli: settings.input_token_weight_milli,
            output_weight_milli: settings.output_token_weight_milli,
            extremes: Extremes::default(),
        }
    }

    /// Returns the user's usage, and the lowest and highest of all users. Prompt tokens count
    /// whether cached or not.
    #[must_use]
    pub fn tokens(&self, user: UserKey) -> UserTokens {
        UserTokens {
            own_milli: self.tokens_milli(user),
            least_milli: self.extremes.least_milli,
            most_milli: self.extremes.most_milli,
        }
    }

    fn tokens_milli(&self, user: UserKey) -> u64 {
        let usage = |user: &User| user.window.sum(self.now_ms, self.bucket_ms);
        self.map
            .get(&user)
            .map_or(0, |user| self.weigh(&usage(user)))
    }

    fn weigh(&self, usage: &UserUsage) -> u64 {
        let input = usage.input_uncached.saturating_add(usage.input_cached);
        let input_milli = input.saturating_mul(u64::from(self.input_weight_milli));
        let output_milli = usage
            .output
            .saturating_mul(u64::from(self.output_weight_milli));
        input_milli.saturating_add(output_milli)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChargeTerms, Users, WINDOW_BUCKET_MS};
    use super::*;
    use crate::command::Charge;
    use crate::ids::ReplicaId;

    fn charge(users: &mut Users, user: u64, input: u64, output: u64, now_ms: u64) {
        let charge = Charge {
            user: UserKey(user),
            input_uncached: input,
            output,
            ..Charge::default()
        };
        assert!(users.charge(ReplicaId(1), &charge, &ChargeTerms::default(), now_ms));
    }

    fn tokens(users: &mut Users, user: u64, now_ms: u64) -> [Option<u64>; 3] {
        let recent_usage = users.recent_usage(now_ms, &VtcBasicSettings::default());
        let tokens = recent_usage.tokens(UserKey(user));
        [
            Some(tokens.own_milli),
            tokens.least_milli,
            tokens.most_milli,
        ]
    }

    #[test]
    fn recent_usage_is_weighted_and_expires_with_the_window() {
        let mut users = Users::new();
        assert_eq!(tokens(&mut users, 1, 0), [Some(0), None, None]);
        charge(&mut users, 1, 100, 50, 0);
        charge(&mut users, 2, 10, 0, WINDOW_BUCKET_MS);
        assert_eq!(
            tokens(&mut users, 1, WINDOW_BUCKET_MS),
            [Some(200_000), Some(10_000), Some(200_000)]
        );
        assert_eq!(
            tokens(&mut users, 3, 5 * WINDOW_BUCKET_MS),
            [Some(0), Some(10_000), Some(10_000)]
        );
        assert_eq!(
            tokens(&mut users, 2, 6 * WINDOW_BUCKET_MS),
            [Some(0), None, None]
        );
        // A returning user counts again, and so does one from before the first scan.
        charge(&mut users, 1, 1, 0, 6 * WINDOW_BUCKET_MS);
        assert_eq!(
            tokens(&mut users, 1, 6 * WINDOW_BUCKET_MS),
            [Some(1000), Some(1000), Some(1000)]
        );
        users.forget_lately();
        charge(&mut users, 2, 5, 0, 6 * WINDOW_BUCKET_MS);
        assert_eq!(
            tokens(&mut users, 1, 6 * WINDOW_BUCKET_MS),
            [Some(1000), Some(1000), Some(5000)]
        );
    }

    #[test]
    fn recent_usage_scans_many_users_in_rounds() {
        let mut users = Users::new();
        let count = 2 * ROUND_USERS as u64 + 1;
        for user in 0..count {
            charge(&mut users, user, user + 1, 0, 0);
        }
        assert_eq!(tokens(&mut users, 0, 0), [Some(1000), None, None]);
        assert_eq!(tokens(&mut users, 0, 0), [Some(1000), None, None]);
        let all = [Some(1000), Some(1000), Some(count * 1000)];
        assert_eq!(tokens(&mut users, 0, 0), all);
        assert_eq!(tokens(&mut users, 0, 0), all);
    }

    #[test]
    fn a_shorter_window_expires_usage_sooner() {
        let mut users = Users::new();
        users.set_window_ms(5_000);
        charge(&mut users, 1, 7, 0, 10_000);
        assert_eq!(tokens(&mut users, 1, 14_999)[0], Some(7000));
        assert_eq!(tokens(&mut users, 1, 15_000)[0], Some(0));
        // Usage recorded under another window length is no longer known.
        users.set_window_ms(50_000);
        assert_eq!(tokens(&mut users, 1, 15_000)[0], Some(0));
        charge(&mut users, 1, 3, 0, 15_000);
        assert_eq!(tokens(&mut users, 1, 15_000)[0], Some(3000));
        assert_eq!(users.check(), Ok(()));
    }
}
