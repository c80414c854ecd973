//! How many engines a demand needs, as pure functions of integers.

use super::ModelDemand;
use crate::bounds::BACKENDS_MAX;

/// Least part of the requests by which places are to exceed them, as a divisor: a twelfth. It is for
/// growth while an engine starts.
pub const SPARE_DIVISOR: u64 = 12;
/// Time within which the engines are to compute the waiting prompts, in milliseconds.
pub const WAIT_TARGET_MS: u64 = 2_000;
/// Time constant over which requests are smoothed, in milliseconds.
pub const SMOOTHING_MS: u64 = 10_000;
/// Time for which the need must have been lower before the number of wanted engines falls, in
/// milliseconds.
pub const HOLD_MS: u64 = 300_000;
/// Places of an engine of which nothing is known, in requests.
pub const PLACES_UNKNOWN: u32 = 16;
/// Time to compute a prompt token of which nothing is known, in nanoseconds.
pub const PREFILL_NS_UNKNOWN: u32 = 100_000;

/// What a model's engines can do, each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EngineRoom {
    /// Number of requests that an engine runs at once, at least 1: the least of its limit and of what
    /// its KV cache holds.
    pub places: u32,
    /// Time to compute a prompt token, in nanoseconds.
    pub prefill_ns: u32,
}

impl Default for EngineRoom {
    fn default() -> Self {
        Self {
            places: PLACES_UNKNOWN,
            prefill_ns: PREFILL_NS_UNKNOWN,
        }
    }
}

/// Returns the number of engines that `milli_requests` thousandths of a request and the waiting prompts
/// of `demand` need; 0 only if `demand` is none and less than one request is left of the smoothed ones.
#[must_use]
pub fn needed_engines(milli_requests: u64, demand: &ModelDemand, room: EngineRoom) -> u32 {
    if demand.requests() == 0 && milli_requests < 1000 {
        return 0;
    }
    let by_places =
        needed_milli_places(milli_requests).div_ceil(1000 * u128::from(room.places.max(1)));
    let by_wait = prefill_ns(demand, room).div_ceil(u128::from(WAIT_TARGET_MS) * 1_000_000);
    let engines = by_places.max(by_wait).clamp(1, BACKENDS_MAX as u128);
    engines as u32
}

/// Returns the places that requests need, in thousandths: more than there are requests by the square
/// root, the deviation of a number of requests that arrive independently, and by at least a twelfth.
/// Many requests vary less than few, relative to their number.
fn needed_milli_places(milli_requests: u64) -> u128 {
    let requests = u128::from(milli_requests);
    let deviation = (requests * 1000).isqrt();
    requests + deviation.max(requests / u128::from(SPARE_DIVISOR))
}

/// Returns how much of what `engines` engines can do the demand takes, in thousandths: of their places,
/// or of the time in which they are to compute the waiting prompts. The demand for a model without
/// engines is compared with one.
#[must_use]
pub fn saturation_permille(
    milli_requests: u64,
    demand: &ModelDemand,
    room: EngineRoom,
    engines: u32,
) -> u32 {
    let engines = u128::from(engines.max(1));
    let places = u128::from(room.places.max(1)) * engines;
    let filled = u128::from(milli_requests) / places;
    let due_ns = u128::from(WAIT_TARGET_MS) * 1_000_000 * engines;
    let wait = prefill_ns(demand, room) * 1000 / due_ns;
    u32::try_from(filled.max(wait)).unwrap_or(u32::MAX)
}

/// Returns the time in which one engine computes the waiting prompts, in nanoseconds.
fn prefill_ns(demand: &ModelDemand, room: EngineRoom) -> u128 {
    u128::from(demand.waiting_tokens) * u128::from(room.prefill_ns)
}

/// Returns `milli` after it has approached `target` for `passed_ms`: exponential smoothing by the
/// backward Euler rule, which no step overshoots. Every step of at least a millisecond moves.
#[must_use]
pub(super) fn smoothed(milli: u64, target: u64, passed_ms: u64) -> u64 {
    let step = |distance: u64| {
        let moved = u128::from(distance) * u128::from(passed_ms);
        let moved = moved.div_ceil(u128::from(passed_ms) + u128::from(SMOOTHING_MS));
        u64::try_from(moved).unwrap_or(distance)
    };
    if target >= milli {
        milli + step(target - milli)
    } else {
        milli - step(milli - target)
    }
}
