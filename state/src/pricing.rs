//! What tokens cost, and what a price is in the unit of a user's counter.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::charge::Charge;
use crate::users::{CHARGE_TOKENS_MAX, FairnessSettings};

/// What of a prompt is charged when it is dispatched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChargeInput {
    /// Tokens not believed cached.
    #[default]
    Uncached,
    /// All tokens.
    Full,
    /// Cached tokens at a tenth.
    Discounted,
}

/// What tokens cost, as settings say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pricing {
    /// Prices per token.
    pub prices: FairnessSettings,
    /// Which prompt tokens count.
    pub charge: ChargeInput,
}

impl Pricing {
    /// Price of a prompt.
    #[must_use]
    pub fn input(&self, uncached: u64, cached: u64) -> u64 {
        let (uncached, cached) = (
            uncached.min(CHARGE_TOKENS_MAX),
            cached.min(CHARGE_TOKENS_MAX),
        );
        let price = u64::from(self.prices.input_price);
        // Both factors are bounded: sums stay far below 64 bits.
        match self.charge {
            ChargeInput::Uncached => uncached * price,
            ChargeInput::Full => (uncached + cached) * price,
            ChargeInput::Discounted => uncached * price + cached * price / 10,
        }
    }

    /// Price of output.
    #[must_use]
    pub fn output(&self, tokens: u64) -> u64 {
        tokens.min(CHARGE_TOKENS_MAX) * u64::from(self.prices.output_price)
    }

    /// What a charge adds to what its user has been charged, in priced tokens.
    #[must_use]
    pub fn due(&self, charge: &Charge) -> u64 {
        let real =
            self.input(charge.input_uncached, charge.input_cached) + self.output(charge.output);
        let advance = charge.advance.min(CHARGE_TOKENS_MAX);
        advance + real.saturating_sub(charge.settled)
    }
}

/// `tokens` priced tokens in the unit of a counter of weight `weight_milli`. Saturates.
pub(crate) fn milli_tokens(tokens: u64, weight_milli: u32) -> u64 {
    let milli = u128::from(tokens) * 1_000_000 / u128::from(weight_milli.max(1));
    u64::try_from(milli).unwrap_or(u64::MAX)
}
