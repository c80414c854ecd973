//! Application of changes to backends that sources request.
//!
//! These changes are not audited. The audit keeps only the most recent writes, and a rolling update
//! of a fleet would displace all others.

use super::RouterState;
use super::admin::unknown_backend;
use crate::backends::BackendSpec;
use crate::discovery::{Discovery, DiscoveryChange, LostBackend};
use crate::ids::Slot;
use crate::reject::Rejection;

impl RouterState {
    pub(super) fn discover(&mut self, discovery: Discovery) -> Result<(), Rejection> {
        discovery.validate()?;
        let Discovery { source, change } = discovery;
        match change {
            DiscoveryChange::Found(spec) => self.found_backend(source, spec),
            DiscoveryChange::Lost { name } => self.lost_backend(&source, &name),
            DiscoveryChange::Forgotten { name } => self.forget_backend(&source, name),
        }?;
        self.is_cold_changed = true;
        Ok(())
    }

    fn found_backend(&mut self, source: String, spec: BackendSpec) -> Result<(), Rejection> {
        let name = spec.id.clone();
        if self.backends.named(&name).is_none() {
            let slot = self.set_backend(spec)?;
            self.discovered.put(slot, source);
            return Ok(());
        }
        let slot = self.slot_of_source(&source, &name)?;
        self.set_backend(spec)?;
        let known = self.discovered.of_source(slot, &source);
        if let Some(lost) = known.and_then(|known| known.lost.take()) {
            self.backends.set_draining(&name, lost.drains_anyway);
        }
        Ok(())
    }

    fn lost_backend(&mut self, source: &str, name: &str) -> Result<(), Rejection> {
        let slot = self.slot_of_source(source, name)?;
        let since_ms = self.time.now_ms;
        let drains_anyway = self.backends.in_slot(slot).is_some_and(|it| it.draining);
        let known = self.discovered.of_source(slot, source);
        if let Some(known) = known.filter(|known| known.lost.is_none()) {
            known.lost = Some(LostBackend {
                since_ms,
                drains_anyway,
            });
            self.backends.set_draining(name, true);
        }
        Ok(())
    }

    /// Removes a backend if it is still lost. Its source may have listed it again meanwhile.
    fn forget_backend(&mut self, source: &str, name: String) -> Result<(), Rejection> {
        let slot = self.slot_of_source(source, &name)?;
        let known = self.discovered.of_source(slot, source);
        if known.is_none_or(|known| known.lost.is_none()) {
            return Err(Rejection::NotOfSource { name });
        }
        self.remove_backend(&name);
        Ok(())
    }

    /// Returns the slot of the backend `name`, or a rejection unless `source` registered it.
    fn slot_of_source(&mut self, source: &str, name: &str) -> Result<Slot, Rejection> {
        let Some(backend) = self.backends.named(name) else {
            return Err(unknown_backend(name.to_owned()));
        };
        let slot = backend.handle.slot;
        match self.discovered.of_source(slot, source) {
            Some(_) => Ok(slot),
            None => Err(Rejection::NotOfSource {
                name: name.to_owned(),
            }),
        }
    }

    /// Hands the backend in `slot` over to the operator. Ends the draining that its loss caused.
    /// Returns whether a source had registered it.
    pub(super) fn take_over(&mut self, slot: Slot, name: &str) -> bool {
        let known = self.discovered.forget(slot);
        let was_discovered = known.is_some();
        if let Some(lost) = known.and_then(|known| known.lost) {
            self.backends.set_draining(name, lost.drains_anyway);
        }
        was_discovered
    }
}
