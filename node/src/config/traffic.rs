//! Limits and timeouts of client traffic.

use super::layers::Values;
use super::read::{count, duration, size};
use super::{Limits, Timeouts};

/// `[limits]`. Whoever comes alone leaves half to others.
pub(super) fn limits(values: &Values) -> Option<Limits> {
    let connections_max = count(values, "limits.max_connections")?;
    let requests_max = count(values, "limits.max_requests")?;
    let share = |path: &str, all: u32| count(values, path).unwrap_or(all.div_ceil(2));
    Some(Limits {
        body_bytes_max: size(values, "limits.max_body")?,
        connections_max,
        connections_per_address_max: share("limits.max_connections_per_address", connections_max),
        requests_max,
        requests_per_address_max: share("limits.max_requests_per_address", requests_max),
        requests_per_user_max: share("limits.max_requests_per_user", requests_max),
        held_bytes_max: size(values, "limits.max_held_bodies"),
        read_ahead_bytes_max: size(values, "limits.read_ahead")?,
        streams_max: count(values, "limits.max_streams")?,
    })
}

/// `[timeouts]`.
pub(super) fn timeouts(values: &Values) -> Option<Timeouts> {
    Some(Timeouts {
        connect: duration(values, "timeouts.connect")?,
        body_idle: duration(values, "timeouts.body_idle")?,
        first_byte: duration(values, "timeouts.first_byte")?,
        idle: duration(values, "timeouts.idle")?,
        untaken: duration(values, "timeouts.untaken")?,
        held_back: duration(values, "timeouts.held_back")?,
    })
}
