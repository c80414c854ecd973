//! Prices of tokens, and the money that usage costs. All arithmetic is exact, in integers.
//!
//! Money is in the operator's unit of account, whatever that is. Prices are per million tokens with
//! up to six digits behind the point, so that the price of one token is an integer of 10⁻¹² units.

use std::collections::BTreeMap;
use std::fmt;

use state::users::UserUsage;

/// Digits behind the point of a price per million tokens.
const PRICE_DIGITS: usize = 6;
/// Digits behind the point of [`Money`].
const MONEY_DIGITS: usize = 12;
/// Maximum price of a million tokens, in millionths: a million units.
const PRICE_MAX: u64 = 1_000_000_000_000;

/// Prices of one model's tokens, in millionths of a unit per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenPrices {
    /// Prompt tokens that engines computed.
    pub prompt: u64,
    /// Prompt tokens that engines found in their prefix caches.
    pub cached: u64,
    /// Output tokens.
    pub output: u64,
}

/// Prices by model.
pub type PriceTable = BTreeMap<String, TokenPrices>;

impl TokenPrices {
    /// Returns what this usage costs.
    #[must_use]
    pub fn of(&self, usage: &UserUsage) -> Money {
        let parts = [
            (self.prompt, usage.input_uncached),
            (self.cached, usage.input_cached),
            (self.output, usage.output),
        ];
        // A product is below 2^104, so no sum of rows overflows.
        let cost = |(price, tokens): (u64, u64)| u128::from(price) * u128::from(tokens);
        Money(parts.into_iter().map(cost).sum())
    }
}

/// An amount of money, in 10⁻¹² units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Money(u128);

impl std::ops::AddAssign for Money {
    fn add_assign(&mut self, other: Self) {
        self.0 = self.0.saturating_add(other.0);
    }
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&decimal(self.0, MONEY_DIGITS))
    }
}

/// Reads a price per million tokens, such as `0.15`, as millionths; `None` if it is none.
#[must_use]
pub fn read_price(text: &str) -> Option<u64> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    if !is_number(whole) || !is_number(rest) || rest.len() > PRICE_DIGITS {
        return None;
    }
    let price: u64 = format!("{whole}{rest:0<PRICE_DIGITS$}").parse().ok()?;
    Some(price).filter(|price| *price <= PRICE_MAX)
}

/// Formats a price so that [`read_price`] reads it.
#[must_use]
pub fn show_price(price: &u64) -> String {
    decimal(u128::from(*price), PRICE_DIGITS)
}

/// Formats `amount / 10^digits` exactly, without trailing zeros.
fn decimal(amount: u128, digits: usize) -> String {
    let padded = format!("{amount:0>width$}", width = digits + 1);
    let (whole, rest) = padded.split_at(padded.len() - digits);
    match rest.trim_end_matches('0') {
        "" => whole.to_owned(),
        rest => format!("{whole}.{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_read_exactly() {
        let cases = [
            ("0.15", Some(150_000)),
            ("3", Some(3_000_000)),
            ("0.000001", Some(1)),
            ("1000000", Some(PRICE_MAX)),
            ("1000000.000001", None),
            ("0.0000001", None),
            ("-1", None),
            ("+1", None),
            (".5", None),
            ("1.", None),
            ("1e3", None),
            ("", None),
        ];
        for (text, price) in cases {
            assert_eq!(read_price(text), price, "{text}");
            if let Some(price) = price {
                assert_eq!(show_price(&price), text);
            }
        }
    }

    #[test]
    fn money_is_exact_to_the_last_token() {
        let prices = TokenPrices {
            prompt: read_price("0.1").unwrap(),
            cached: read_price("0.01").unwrap(),
            output: read_price("0.7").unwrap(),
        };
        let usage = UserUsage {
            input_uncached: 3,
            input_cached: 1,
            output: 1,
            requests: 1,
        };
        assert_eq!(prices.of(&usage).to_string(), "0.00000101");
        let huge = UserUsage {
            output: u64::MAX,
            ..UserUsage::default()
        };
        let mut sum = prices.of(&huge);
        sum += prices.of(&usage);
        assert_eq!(sum.to_string(), "12912720851596.68613151");
    }
}
