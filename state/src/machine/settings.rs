//! Application of commands that set routing and admission settings.

use std::borrow::Cow;

use bincode::{Decode, Encode};

use super::{AuditAction, RouterState};
use crate::command::Origin;
use crate::policy::RoutingSettings;
use crate::reject::Rejection;
use crate::settings::AdmissionSettings;

/// Replicated settings that an operator can set; `None` while the defaults apply.
#[derive(Debug, Clone, PartialEq, Default, Encode, Decode)]
pub(super) struct OperatorSettings {
    pub(super) routing: Option<RoutingSettings>,
    pub(super) admission: Option<AdmissionSettings>,
}

impl OperatorSettings {
    /// Validates the settings that `apply` relies on. An error describes the first fault.
    pub(super) fn validate(&self) -> Result<(), String> {
        let routing = self
            .routing
            .as_ref()
            .map_or(Ok(()), RoutingSettings::validate);
        let admission = self
            .admission
            .as_ref()
            .map_or(Ok(()), AdmissionSettings::validate);
        routing.and(admission).map_err(|reject| reject.to_string())
    }
}

impl RouterState {
    pub(super) fn put_routing(
        &mut self,
        origin: &Origin,
        settings: RoutingSettings,
    ) -> Result<(), Rejection> {
        settings.validate()?;
        self.settings.routing = Some(settings);
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
        if settings.bins != self.admission_settings().bins {
            self.outputs.rebin(settings.bins);
            self.is_outputs_changed = true;
        }
        self.settings.admission = Some(settings);
    }

    /// Returns the routing settings other than the live policy, or the defaults if not set.
    pub(super) fn routing_settings(&self) -> Cow<'_, RoutingSettings> {
        let settings = self.settings.routing.as_ref();
        settings.map_or_else(|| Cow::Owned(RoutingSettings::default()), Cow::Borrowed)
    }

    /// Returns the admission settings, or the defaults if not set.
    pub(super) fn admission_settings(&self) -> Cow<'_, AdmissionSettings> {
        let settings = self.settings.admission.as_ref();
        settings.map_or_else(|| Cow::Owned(AdmissionSettings::default()), Cow::Borrowed)
    }
}
