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

/// Lowers the limits on clients to what `descriptors` descriptors can support.
pub fn fit(limits: &mut ProxyLimits, descriptors: u64) {
    let (connections, requests) = (limits.connections_max, limits.requests_max);
    let fitting = fitting(connections, requests, descriptors);
    if fitting == (connections, requests) {
        return;
    }
    (limits.connections_max, limits.requests_max) = fitting;
    tracing::warn!(
        descriptors,
        wanted = wanted(connections, requests),
        configured_connections = connections,
        configured_requests = requests,
        max_connections = limits.connections_max,
        max_requests = limits.requests_max,
        "too few file descriptors for limits.max_connections and limits.max_requests, now lowered \
         (LimitNOFILE, ulimit -n)"
    );
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
