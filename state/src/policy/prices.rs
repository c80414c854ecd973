//! Learned prices of a backend's work, as policies see them.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::price_classes::PriceRange;
use crate::kv_events::LOWER_TIERS;

/// Prices of a backend's work before a first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
pub struct Prices {
    /// Delay of a first token per uncached prompt token, in nanoseconds; milliseconds in JSON.
    #[serde(
        rename = "prefill_ms_per_token",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub prefill_ns_per_token: u32,
    /// Delay of a first token per running request, in nanoseconds: at least its share of one step;
    /// milliseconds in JSON.
    #[serde(
        rename = "decode_ms_per_request",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub decode_ns_per_request: u32,
    /// Range of `prefill_ns_per_token` according to the measurements alone, in nanoseconds;
    /// `None` if it is unknown. Milliseconds in JSON.
    #[serde(
        rename = "prefill_range_ms",
        serialize_with = "crate::readable::ms_of_ns_range"
    )]
    #[schemars(with = "Option<[f64; 2]>")]
    pub prefill_range_ns: Option<(u32, u32)>,
    /// Range of `decode_ns_per_request` according to the measurements alone, in nanoseconds;
    /// `None` if it is unknown. Milliseconds in JSON.
    #[serde(
        rename = "decode_range_ms",
        serialize_with = "crate::readable::ms_of_ns_range"
    )]
    #[schemars(with = "Option<[f64; 2]>")]
    pub decode_range_ns: Option<(u32, u32)>,
    /// Delay of a first token per prompt token that is loaded from a tier below the GPU.
    pub load: LoadPrices,
}

/// Delay of a first token per prompt token that is loaded from each tier below the GPU, in
/// nanoseconds; milliseconds in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
pub struct LoadPrices {
    /// From memory of the engine's host.
    #[serde(
        rename = "cpu_ms_per_token",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub cpu_ns_per_token: u32,
    /// From storage of the engine's host.
    #[serde(
        rename = "disk_ms_per_token",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub disk_ns_per_token: u32,
    /// From a store that several engines share.
    #[serde(
        rename = "store_ms_per_token",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub store_ns_per_token: u32,
}

impl LoadPrices {
    /// What is assumed before anything was learned: a cache of 128 KiB per token, as of a model with
    /// 8 billion parameters, at 25 GB/s (PCIe), 6 GB/s (NVMe) and 2.5 GB/s (network).
    pub const ASSUMED: Self = Self {
        cpu_ns_per_token: 5_000,
        disk_ns_per_token: 20_000,
        store_ns_per_token: 50_000,
    };

    /// Returns the prices, fastest tier first.
    #[must_use]
    pub fn all(self) -> [u32; LOWER_TIERS] {
        [
            self.cpu_ns_per_token,
            self.disk_ns_per_token,
            self.store_ns_per_token,
        ]
    }
}

impl Prices {
    pub(super) fn prefill(self) -> PriceRange {
        PriceRange {
            price: self.prefill_ns_per_token,
            range: self.prefill_range_ns,
        }
    }

    pub(super) fn decode(self) -> PriceRange {
        PriceRange {
            price: self.decode_ns_per_request,
            range: self.decode_range_ns,
        }
    }
}
