//! File descriptors of the process: raises their limit as far as the system allows, and limits
//! clients accordingly.
//!
//! A client connection takes one descriptor, and its request takes one more for the engine. The
//! limits on clients leave a reserve for the log, peers, operators and probes, which is at most
//! half of all descriptors.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use api::proxy::ProxyLimits;

/// Number of descriptors that clients cannot use: 128 for connections from peers, 96 for operators,
/// and 64 for the log, snapshots, listeners, links to peers, probes and the runtime.
const RESERVE: u64 = 288;

/// Raises the soft limit to the hard one and returns the resulting limit.
pub fn raise() -> u64 {
    let before = getrlimit(Resource::Nofile);
    let wished = Rlimit {
        current: before.maximum,
        ..before
    };
    // Even without a hard limit, the kernel may grant less.
    if before.current != before.maximum
        && let Err(error) = setrlimit(Resource::Nofile, wished)
    {
        tracing::warn!(%error, "could not raise the limit of file descriptors");
    }
    let limit = limit();
    if before.current != Some(limit) {
        tracing::info!(
            before = before.current,
            limit,
            "raised the limit of file descriptors"
        );
    }
    limit
}

/// Returns the process's current limit on descriptors.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Lowers the limits on clients to what `descriptors` descriptors can support. Logs it if that
/// changes the limits in force.
pub fn fit(limits: &mut ProxyLimits, in_force: Option<&ProxyLimits>, descriptors: u64) {
    let configured = (limits.connections_max, limits.requests_max);
    let (connections, requests) = configured;
    let fitting = fitting(connections, requests, descriptors);
    (limits.connections_max, limits.requests_max) = fitting;
    let same = |it: &ProxyLimits| (it.connections_max, it.requests_max) == fitting;
    if fitting == configured || in_force.is_some_and(same) {
        return;
    }
    const TEXT: &str = "too few file descriptors for limits.max_connections and \
                        limits.max_requests, now lowered (LimitNOFILE, ulimit -n)";
    let wanted = wanted(connections, requests);
    let (max_connections, max_requests) = fitting;
    // More than half of what was wanted is no fault.
    if max_connections > connections / 2 && max_requests > requests / 2 {
        tracing::info!(descriptors, wanted, max_connections, max_requests, "{TEXT}");
    } else {
        tracing::warn!(descriptors, wanted, max_connections, max_requests, "{TEXT}");
    }
}

fn wanted(connections: u32, requests: u32) -> u64 {
    RESERVE + u64::from(connections) + u64::from(requests)
}

/// Returns how many connections and requests `descriptors` can support without the reserve. Each
/// may use what the other does not need.
fn fitting(connections: u32, requests: u32, descriptors: u64) -> (u32, u32) {
    // With an extremely low limit, give clients at least half of it.
    let free = descriptors - RESERVE.min(descriptors / 2);
    let share = |own: u32, other: u32| {
        let most = (free / 2).max(free.saturating_sub(other.into())).max(1);
        own.min(u32::try_from(most).unwrap_or(u32::MAX))
    };
    (share(connections, requests), share(requests, connections))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sufficient_descriptor_limit_is_kept() {
        let wanted = wanted(16_384, 16_384);
        assert_eq!(fitting(16_384, 16_384, wanted), (16_384, 16_384));
        assert_eq!(fitting(10, 20, u64::MAX), (10, 20));
    }

    #[test]
    fn clients_cannot_use_reserved_descriptors() {
        for descriptors in [2, 20, 300, 512, 513, 1024, 20_000] {
            for (connections, requests) in [(16_384, 16_384), (100, 16_384), (16_384, 3)] {
                let (fit_connections, fit_requests) = fitting(connections, requests, descriptors);
                let taken = u64::from(fit_connections) + u64::from(fit_requests);
                let reserve = RESERVE.min(descriptors / 2);
                assert!(
                    taken + reserve <= descriptors.max(3),
                    "{taken} of {descriptors}"
                );
                assert!(fit_connections >= 1 && fit_requests >= 1);
                assert!(fit_connections <= connections && fit_requests <= requests);
            }
        }
        assert_eq!(fitting(16_384, 16_384, 1024), (368, 368));
        assert_eq!(fitting(16_384, 100, 1024), (636, 100));
    }
}
