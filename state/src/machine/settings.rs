//! Application of commands that set routing and admission settings.

use bincode::{Decode, Encode};

use super::{AuditAction, RouterState};
use crate::command::Origin;
use crate::policy::RoutingSettings;
use crate::reject::Rejection;
use crate::settings::AdmissionSettings;

/// Replicated settings that an operator can set, apart from the policy and what belongs to users.
#[derive(Debug, Clone, PartialEq, Default, Encode, Decode)]
pub(super) struct OperatorSettings {
    pub(super) routing: RoutingSettings,
    pub(super) admission: AdmissionSettings,
}

impl OperatorSettings {
    /// Validates the settings that `apply` relies on. An error describes the first fault.
    pub(super) fn validate(&self) -> Result<(), String> {
        let routing = self.routing.validate();
        let all = routing.and_then(|()| self.admission.validate());
        all.map_err(|reject| reject.to_string())
    }
}

impl RouterState {
    pub(super) fn put_routing(
        &mut self,
        origin: &Origin,
        settings: RoutingSettings,
    ) -> Result<(), Rejection> {
        settings.validate()?;
        self.settings.routing = settings;
        self.resize_unknown_capacities();
        self.note(origin, AuditAction::PutRouting, String::new());
        Ok(())
    }

    pub(super) fn put_admission(
        &mut self,
        origin: &Origin,
        settings: AdmissionSettings,
    ) -> Result<(), Rejection> {
        settings.validate()?;
        self.set_admission(settings);
        self.note(origin, AuditAction::PutAdmission, String::new());
        Ok(())
    }

    /// Replaces the admission settings with validated ones, and recomputes bins if necessary.
    pub(super) fn set_admission(&mut self, settings: AdmissionSettings) {
        if settings.bins != self.settings.admission.bins {
            self.outputs.rebin(settings.bins);
            self.is_outputs_changed = true;
        }
        self.settings.admission = settings;
    }
}
