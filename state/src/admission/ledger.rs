//! Charging ahead without ever lowering a counter.
//!
//! A request is charged at dispatch for its prompt as estimated, and with `vtc-pred` for its
//! predicted output: an *advance*. What really comes is settled from the advance first; only what
//! exceeds it is charged. When the request is over, what is left of the advance becomes the user's
//! *credit* at this replica, which later advances and charges of the user use up first. So counters
//! never fall, usage statistics count real tokens only, and over time a user pays exactly what was
//! used. Credit is lost with the replica's run: the user has then paid too much by at most the
//! advances of the requests that ended last.

use std::collections::BTreeMap;

use super::Pricing;
use crate::charge::Charge;
use crate::ids::UserKey;
use crate::planted::{self, Bug};

/// Most users with credit; beyond it further credit is not kept.
pub const CREDITED_USERS_MAX: usize = 100_000;

/// What one dispatch has charged ahead and not used yet, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Advance {
    input: u64,
    output: u64,
}

impl Advance {
    /// What is charged ahead and not used.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

/// Tokens of one request that came since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenDelta {
    /// Prompt tokens the engine computed.
    pub input_uncached: u64,
    /// Prompt tokens the engine had cached.
    pub input_cached: u64,
    /// Output tokens.
    pub output: u64,
}

/// The users' credit at one replica.
#[derive(Debug, Clone, Default)]
pub struct CreditLedger {
    credits: BTreeMap<UserKey, u64>,
}

impl CreditLedger {
    /// A dispatch begins: charges `estimate` ahead. The charge has no counts of requests. Which
    /// output to charge ahead is the caller's to say: none, or with `vtc-pred` what is predicted.
    pub fn open(
        &mut self,
        user: UserKey,
        estimate: &TokenDelta,
        pricing: &Pricing,
    ) -> (Advance, Charge) {
        let advance = Advance {
            input: pricing.input(estimate.input_uncached, estimate.input_cached),
            output: pricing.output(estimate.output),
        };
        let charge = Charge {
            user,
            advance: advance.left() - self.take(user, advance.left()),
            ..Charge::default()
        };
        (advance, charge)
    }

    /// A dispatch begins whose price of `tokens` the log has charged with its grant.
    #[must_use]
    pub fn open_granted(tokens: u64, estimate: &TokenDelta, pricing: &Pricing) -> Advance {
        let input = pricing.input(estimate.input_uncached, estimate.input_cached);
        let input = input.min(tokens);
        Advance {
            input,
            output: tokens - input,
        }
    }

    /// More output is expected of a dispatch than was charged ahead: charges so many tokens more.
    pub fn raise(
        &mut self,
        user: UserKey,
        advance: &mut Advance,
        output: u64,
        pricing: &Pricing,
    ) -> Charge {
        let ahead = pricing.output(output);
        advance.output = advance.output.saturating_add(ahead);
        Charge {
            user,
            advance: ahead - self.take(user, ahead),
            ..Charge::default()
        }
    }

    /// Tokens came: what to charge for them.
    pub fn settle(
        &mut self,
        user: UserKey,
        advance: &mut Advance,
        used: &TokenDelta,
        pricing: &Pricing,
    ) -> Charge {
        let input = pricing.input(used.input_uncached, used.input_cached);
        let output = pricing.output(used.output);
        let from_tab = take(&mut advance.input, input) + take(&mut advance.output, output);
        let from_tab = match planted::is(Bug::AdvanceForgotten) {
            true => 0,
            false => from_tab,
        };
        let rest = input + output - from_tab;
        Charge {
            user,
            input_uncached: used.input_uncached,
            input_cached: used.input_cached,
            output: used.output,
            settled: from_tab + self.take(user, rest),
            ..Charge::default()
        }
    }

    /// A dispatch is over: what it did not use is the user's credit.
    pub fn close(&mut self, user: UserKey, advance: Advance) {
        self.credit(user, advance.left());
    }

    /// Gives `user` credit of so many priced tokens, as for a grant that is not used.
    pub fn credit(&mut self, user: UserKey, tokens: u64) {
        let is_known = self.credits.contains_key(&user);
        if tokens == 0 || (!is_known && self.credits.len() >= CREDITED_USERS_MAX) {
            return;
        }
        let credit = self.credits.entry(user).or_default();
        *credit = credit.saturating_add(tokens);
    }

    /// What the user has charged ahead at this replica and not used, requests under way left out.
    #[must_use]
    pub fn credit_of(&self, user: UserKey) -> u64 {
        self.credits.get(&user).copied().unwrap_or_default()
    }

    /// Uses up to `most` of the user's credit.
    fn take(&mut self, user: UserKey, most: u64) -> u64 {
        let Some(credit) = self.credits.get_mut(&user) else {
            return 0;
        };
        let taken = take(credit, most);
        if *credit == 0 {
            self.credits.remove(&user);
        }
        taken
    }
}

fn take(from: &mut u64, most: u64) -> u64 {
    let taken = most.min(*from);
    *from -= taken;
    taken
}
