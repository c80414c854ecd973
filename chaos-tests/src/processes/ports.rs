//! Ports that stay the same across restarts.
//!
//! They lie below the range from which the kernel takes ports for outgoing connections (32768 and
//! up), so that no connection occupies one while its replica is down.

use std::net::TcpListener;

use anyhow::ensure;
use rand::Rng;

const FIRST: u16 = 20_000;
const LAST: u16 = 32_000;

/// `count` ports on loopback that nobody listens on.
pub(super) fn free(count: usize) -> anyhow::Result<Vec<u16>> {
    let mut found = Vec::new();
    // From a random place, so that test processes side by side do not meet.
    let start = rand::rng().random_range(FIRST..LAST);
    for port in (start..LAST).chain(FIRST..start) {
        if found.len() == count {
            break;
        }
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            found.push(port);
        }
    }
    ensure!(
        found.len() == count,
        "only {} of {count} ports are free",
        found.len()
    );
    Ok(found)
}
