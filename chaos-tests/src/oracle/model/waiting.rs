//! The model's waiting list for grants through the log, by linear search.

use state::grants::Wait;
use state::ids::{ModelKey, ReplicaId, Ticket, UserKey};

/// All waiting and granted requests, in the order of the log.
#[derive(Debug, Clone, Default)]
pub struct ModelWaitingList(Vec<ModelWait>);

#[derive(Debug, Clone, Copy)]
struct ModelWait {
    replica: ReplicaId,
    wait: Wait,
    is_granted: bool,
}

impl ModelWaitingList {
    pub(super) fn wait(&mut self, replica: ReplicaId, wait: Wait) {
        let is_known = |it: &ModelWait| it.replica == replica && it.wait.ticket == wait.ticket;
        if !self.0.iter().any(is_known) {
            self.0.push(ModelWait {
                replica,
                wait,
                is_granted: false,
            });
        }
    }

    pub(super) fn leave(&mut self, replica: ReplicaId, ticket: Ticket) {
        self.0
            .retain(|it| it.replica != replica || it.wait.ticket != ticket);
    }

    /// Grants the next waiting request of a model: the one with the highest priority, then the
    /// least counter, then the first in the log.
    pub(super) fn grant(
        &mut self,
        model: ModelKey,
        counter: impl Fn(UserKey) -> u64,
    ) -> Option<(ReplicaId, Wait)> {
        let waiting = self.0.iter().enumerate();
        let waiting = waiting.filter(|(_, it)| !it.is_granted && it.wait.model == model);
        let (at, _) = waiting.min_by_key(|(at, it)| {
            let priority = -i32::from(it.wait.priority);
            (priority, counter(it.wait.user), *at)
        })?;
        self.0[at].is_granted = true;
        Some((self.0[at].replica, self.0[at].wait))
    }

    /// Removes a replica's requests. Returns the model of each granted one, in the order of
    /// tickets.
    pub(super) fn close(&mut self, replica: ReplicaId) -> Vec<ModelKey> {
        let mut gone: Vec<ModelWait> = Vec::new();
        self.0.retain(|it| {
            let stays = it.replica != replica;
            if !stays {
                gone.push(*it);
            }
            stays
        });
        gone.sort_by_key(|it| it.wait.ticket);
        gone.iter()
            .filter(|it| it.is_granted)
            .map(|it| it.wait.model)
            .collect()
    }
}
