//! What a probe makes of the kind of engine that it finds, which may have changed.

use super::engine_kind::EngineKind;
use super::health::ProbeRecord;

impl ProbeRecord {
    /// Records the kind of the engine, and returns it if it changed.
    pub(super) fn recognised(&mut self, kind: Option<EngineKind>) -> Option<EngineKind> {
        let kind = kind.filter(|_| kind != self.kind)?;
        self.kind = Some(kind);
        Some(kind)
    }

    /// Records the engine that names itself as the owner of its models. Its metrics say more, but
    /// only SGLang and llama.cpp export none unless told to, and such a one may have replaced
    /// another engine at the address. Only SGLang is taken for what it calls itself.
    pub(super) fn owned_by(&mut self, owner: Option<EngineKind>) {
        let is_measured = self.scrape_failures_in_row == 0 && self.metrics.kind.is_some();
        let owner = owner.filter(|owner| !is_measured && self.kind != Some(*owner));
        if let Some(owner) = owner {
            self.kind = (owner == EngineKind::Sglang).then_some(owner);
        }
    }
}
