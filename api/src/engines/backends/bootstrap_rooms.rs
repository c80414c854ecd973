//! Engines that meet in bootstrap rooms: SGLang's prefill and decode engines.
//!
//! Both engines of a pair get the request at once, with the address of the prefill engine's
//! bootstrap server and the number of a room there. An engine in either mode refuses a request that
//! has a prompt to compute but no room, so it cannot serve one alone.

use state::Backend;
use state::command::BackendRole;

use super::Backends;

/// Label by which an operator declares that a backend's engine meets others in rooms. Its value is
/// the port of a prefill engine's bootstrap server. Without the label, the engine is queried.
pub const BOOTSTRAP_PORT_LABEL: &str = "bootstrap-port";
/// Default port of SGLang's bootstrap server.
const BOOTSTRAP_PORT: u16 = 8998;

impl Backends {
    /// Whether the engine of `backend` cannot work alone, but must meet another in a room:
    /// according to its label, or else to its kind and role.
    #[must_use]
    pub fn meets_in_rooms(&self, backend: &Backend) -> bool {
        if backend.spec.role == BackendRole::Both {
            return false;
        }
        let flags = self.health_flags(backend.handle.slot);
        flags.is_some_and(|flags| flags.meets_in_rooms)
            || backend.spec.labels.contains_key(BOOTSTRAP_PORT_LABEL)
    }

    /// Returns the port of a prefill engine's bootstrap server: from its label, or else as the
    /// engine reports it.
    #[must_use]
    pub(crate) fn bootstrap_port(&self, backend: &Backend) -> u16 {
        let label = backend.spec.labels.get(BOOTSTRAP_PORT_LABEL);
        let told = || {
            let record = self.record(backend.handle.slot)?;
            record.disaggregation?.bootstrap_port
        };
        let port = label.and_then(|port| port.parse().ok()).or_else(told);
        port.unwrap_or(BOOTSTRAP_PORT)
    }
}
