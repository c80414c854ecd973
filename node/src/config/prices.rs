//! Keys of `[[prices]]`, and the table that they become.

use api::prices::{PriceTable, TokenPrices};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use super::form::{As, AsOption, PriceForm};

/// Keys of an entry of `[[prices]]`: what a model's tokens cost, for `GET /admin/v1/usage`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PriceConfig {
    /// Model that serves, as `quorate usage --by model` shows it, so no alias and no split; `other`
    /// for all models that no backend names.
    pub name: String,
    /// Price of a million prompt tokens that an engine computed, such as `"0.15"`.
    #[serde(with = "As::<PriceForm>")]
    pub prompt: u64,
    /// Price of a million prompt tokens that an engine found in its cache. Default: `prompt`.
    #[serde(with = "AsOption::<PriceForm>")]
    pub cached: Option<u64>,
    /// Price of a million output tokens.
    #[serde(with = "As::<PriceForm>")]
    pub output: u64,
}

/// Returns the prices by model.
pub(super) fn table(prices: &[PriceConfig]) -> PriceTable {
    let entry = |it: &PriceConfig| {
        let prices = TokenPrices {
            prompt: it.prompt,
            cached: it.cached.unwrap_or(it.prompt),
            output: it.output,
        };
        (it.name.clone(), prices)
    };
    prices.iter().map(entry).collect()
}
