//! Token prices, and the conversion of priced tokens into the unit of a user's counter.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bounds::CHARGE_TOKENS_MAX;
use crate::charge::Charge;
use crate::reject::Rejection;
use crate::validate::ensure;

/// Weight of a user without a weight of its own, in thousandths.
pub const WEIGHT_MILLI_DEFAULT: u32 = 1000;
/// Maximum price of one token.
const PRICE_MAX: u32 = 1_000;

/// Token prices. They are replicated, and fixed when the cluster is initialised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FairnessSettings {
    /// Price of one uncached prompt token, at most 1000.
    pub input_price: u32,
    /// Price of one output token, at most 1000.
    pub output_price: u32,
}

impl Default for FairnessSettings {
    /// Returns the prices of the VTC paper.
    fn default() -> Self {
        Self {
            input_price: 1,
            output_price: 2,
        }
    }
}

impl FairnessSettings {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(
            self.input_price <= PRICE_MAX,
            "fairness.input_price",
            "at most 1000",
        )?;
        ensure(
            self.output_price <= PRICE_MAX,
            "fairness.output_price",
            "at most 1000",
        )
    }
}

/// Prompt tokens that a dispatch is charged for.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ChargeInput {
    /// Tokens not believed to be cached.
    #[default]
    Uncached,
    /// All tokens.
    Full,
    /// Cached tokens at a tenth of their price.
    Discounted,
}

/// Token prices, together with the rule for prompt tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pricing {
    /// Prices per token.
    pub prices: FairnessSettings,
    /// Rule for which prompt tokens are charged.
    pub charge: ChargeInput,
}

impl Pricing {
    /// Returns the price of a prompt with `uncached` and `cached` tokens, in priced tokens.
    #[must_use]
    pub fn input(&self, uncached: u64, cached: u64) -> u64 {
        let (uncached, cached) = (
            uncached.min(CHARGE_TOKENS_MAX),
            cached.min(CHARGE_TOKENS_MAX),
        );
        let price = u64::from(self.prices.input_price);
        // Both factors are bounded, so sums stay far below 64 bits.
        match self.charge {
            ChargeInput::Uncached => uncached * price,
            ChargeInput::Full => (uncached + cached) * price,
            ChargeInput::Discounted => uncached * price + cached * price / 10,
        }
    }

    /// Returns the price of `tokens` output tokens, in priced tokens.
    #[must_use]
    pub fn output(&self, tokens: u64) -> u64 {
        tokens.min(CHARGE_TOKENS_MAX) * u64::from(self.prices.output_price)
    }

    /// Returns how much `charge` adds to its user's total, in priced tokens.
    #[must_use]
    pub fn due(&self, charge: &Charge) -> u64 {
        let real =
            self.input(charge.input_uncached, charge.input_cached) + self.output(charge.output);
        let advance = charge.advance.min(CHARGE_TOKENS_MAX);
        advance + real.saturating_sub(charge.settled)
    }
}

/// Converts priced tokens into thousandths at `weight_milli`, the unit of counters. Saturates.
pub(crate) fn milli_tokens(tokens: u64, weight_milli: u32) -> u64 {
    let milli = u128::from(tokens) * 1_000_000 / u128::from(weight_milli.max(1));
    u64::try_from(milli).unwrap_or(u64::MAX)
}
