//! Application of commands that create, rotate and revoke API keys.

use super::{AuditAction, RouterState};
use crate::command::Origin;
use crate::ids::ApiKeyId;
use crate::keys::{ApiKeySpec, SecretHash};
use crate::reject::Rejection;

impl RouterState {
    pub(super) fn create_key(
        &mut self,
        origin: &Origin,
        spec: ApiKeySpec,
    ) -> Result<(), Rejection> {
        let id = spec.id;
        self.keys.create(spec, self.stamped_ms)?;
        self.note(origin, AuditAction::CreateKey, id.to_string());
        Ok(())
    }

    /// Revokes a key so that no restore brings it back.
    pub(super) fn revoke_key(&mut self, origin: &Origin, id: ApiKeyId) -> Result<(), Rejection> {
        let subject = self.key_subject(id);
        self.keys.revoke(id, self.stamped_ms)?;
        self.note(origin, AuditAction::RevokeKey, subject);
        Ok(())
    }

    pub(super) fn rotate_key(
        &mut self,
        origin: &Origin,
        id: ApiKeyId,
        (secret, grace_ms): (SecretHash, u64),
    ) -> Result<(), Rejection> {
        let calendar_ms = self.stamped_ms;
        self.keys.rotate(id, secret, grace_ms, calendar_ms)?;
        self.note(origin, AuditAction::RotateKey, id.to_string());
        Ok(())
    }

    /// Returns the description of a key in the audit, which outlives the key.
    fn key_subject(&self, id: ApiKeyId) -> String {
        match self.keys.get(id) {
            None => id.to_string(),
            Some(key) => key.subject(),
        }
    }

    /// Publishes the API keys if they changed.
    pub(super) fn publish_keys(&mut self) {
        if let Some(keys) = self.keys.publish() {
            self.view.publish_keys(keys);
        }
    }
}
