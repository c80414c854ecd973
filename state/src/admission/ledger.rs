//! Charging in advance without ever lowering a counter.
//!
//! A request is charged at dispatch for its estimated prompt and, with `vtc-pred`, for its
//! predicted output: an *advance*. Actual usage is settled from the advance first, and only the
//! excess is charged. When the request ends, the rest of the advance becomes the user's *credit* at
//! this replica, which pays for the user's later advances and charges first. Counters therefore
//! never fall, usage statistics count real tokens only, and over time a user pays exactly for what
//! was used. Credit is lost when the replica restarts: the user has then overpaid by at most the
//! advances of the last requests.

use std::collections::BTreeMap;

use super::Pricing;
use crate::charge::Charge;
use crate::ids::UserKey;

/// Maximum number of users with credit. The ledger drops the credit of further users.
pub const CREDITED_USERS_MAX: usize = 100_000;

/// Unused advance of one dispatch, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Advance {
    input: u64,
    output: u64,
}

impl Advance {
    /// Returns the unused advance of a stream that another request has taken over, in priced tokens.
    /// It pays for the prompt first, unless that is charged already.
    #[must_use]
    pub fn left_over(tokens: u64, is_prompt_charged: bool) -> Self {
        match is_prompt_charged {
            true => Self {
                input: 0,
                output: tokens,
            },
            false => Self {
                input: tokens,
                output: 0,
            },
        }
    }

    /// Returns the unused advance, input and output together, in priced tokens.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

/// Tokens of one request since it was last accounted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenDelta {
    /// Prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Prompt tokens that the engine found in its cache.
    pub input_cached: u64,
    /// Output tokens that the engine generated.
    pub output: u64,
}

/// Credit of the users at one replica, in priced tokens.
#[derive(Debug, Clone, Default)]
pub struct CreditLedger {
    credits: BTreeMap<UserKey, u64>,
}

impl CreditLedger {
    /// Opens a dispatch and charges `estimate` in advance, less the user's credit. The charge
    /// contains no request counts. The caller decides how much output to charge: none, or with
    /// `vtc-pred` the prediction.
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
            advance: advance.left() - self.consume_credit(user, advance.left()),
            ..Charge::default()
        };
        (advance, charge)
    }

    /// Raises the advance of a dispatch that is expected to produce `output` more tokens than
    /// charged. Returns the charge for the difference, less the user's credit.
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
            advance: ahead - self.consume_credit(user, ahead),
            ..Charge::default()
        }
    }

    /// Settles used tokens against the advance, then against the user's credit. Returns the charge.
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
        let rest = input + output - from_tab;
        Charge {
            user,
            input_uncached: used.input_uncached,
            input_cached: used.input_cached,
            output: used.output,
            settled: from_tab + self.consume_credit(user, rest),
            ..Charge::default()
        }
    }

    /// Closes a dispatch and turns its unused advance into credit of the user.
    pub fn close(&mut self, user: UserKey, advance: Advance) {
        self.credit(user, advance.left());
    }

    /// Credits `user` with `tokens` priced tokens. Does nothing for a new user beyond
    /// [`CREDITED_USERS_MAX`].
    fn credit(&mut self, user: UserKey, tokens: u64) {
        let is_known = self.credits.contains_key(&user);
        if tokens == 0 || (!is_known && self.credits.len() >= CREDITED_USERS_MAX) {
            return;
        }
        let credit = self.credits.entry(user).or_default();
        *credit = credit.saturating_add(tokens);
    }

    /// Returns the user's credit at this replica in priced tokens, without advances in flight.
    #[must_use]
    pub fn credit_of(&self, user: UserKey) -> u64 {
        self.credits.get(&user).copied().unwrap_or_default()
    }

    /// Uses up to `most` of the user's credit and returns the amount used.
    fn consume_credit(&mut self, user: UserKey, most: u64) -> u64 {
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
