//! A crash during the run: replicas lose their memory, and optionally their disks. Clients resend
//! the requests that were cut off.

use state::RouterState;

use super::{ReplicaPlace, RequestStage, SimWorld};
use crate::simulate::plan::RestartScope;
use crate::simulate::replica::state_of;

impl SimWorld<'_> {
    pub(super) fn restart(&mut self) {
        let Some(restart) = self.plan.restart else {
            return;
        };
        let down = match restart.who {
            RestartScope::All => self.places.len(),
            RestartScope::One => 1,
        };
        let is_log_lost = restart.wipe && (down == self.places.len() || !self.is_shared());
        let cut_off = self.cut_off(down);
        for place in 0..down {
            let state = self.state_after(place, restart.wipe, is_log_lost);
            if is_log_lost {
                self.epochs[place] += 1;
                self.next_index[place] = state.applied().0 + 1;
            }
            self.start_again(place, state);
        }
        self.tally.resent += cut_off.len() as u64;
        for request in cut_off {
            self.enter(request);
        }
    }

    fn is_shared(&self) -> bool {
        self.plan.ownership_lag.is_some()
    }

    /// Ends the open requests of the first `down` replicas, also at engines, because a broken
    /// connection aborts its request. Returns their numbers.
    fn cut_off(&mut self, down: usize) -> Vec<usize> {
        let mut cut = Vec::new();
        for (number, request) in self.requests.iter_mut().enumerate() {
            if request.replica >= down {
                continue;
            }
            match &request.stage {
                RequestStage::Ended => continue,
                RequestStage::Waiting => self.tally.service.waits_no_more(request.user),
                RequestStage::Running(flight) => {
                    let rest = request.output_tokens - request.served_output;
                    self.tally.kept(request.user, rest);
                    self.engines[usize::from(flight.backend.slot.0)].abort(number);
                    if let Some(computing) = flight.prefill_engine() {
                        self.engines[computing].abort(number);
                    }
                }
            }
            request.stage = RequestStage::Waiting;
            // The next backend produces the whole output again.
            request.served_output = 0;
            cut.push(number);
        }
        cut
    }

    /// Returns a replica's state after its restart, restored from the bytes of a snapshot as in
    /// production, or the initial state if the log is lost.
    fn state_after(&self, place: usize, wipe: bool, is_log_lost: bool) -> RouterState {
        if is_log_lost {
            return state_of(&self.setup);
        }
        // A wiped replica gets a snapshot from another one.
        let source = if wipe { self.places.len() - 1 } else { place };
        let mut bytes = Vec::new();
        let frozen = self.places[source].replica.state.freeze();
        frozen
            .write_to(&mut bytes)
            .expect("a vector takes any bytes");
        let mut state = RouterState::new();
        state
            .restore(&mut bytes.as_slice())
            .expect("a snapshot that was just written");
        state
    }

    fn start_again(&mut self, place: usize, state: RouterState) {
        let session = self.places[place].session + 1;
        let id = self.places[place].replica.id.0;
        self.places[place] = ReplicaPlace {
            last_flush: self.now,
            ..ReplicaPlace::new(id, session, state, self.plan, &self.run)
        };
        let replica = &self.places[place].replica;
        replica.probed(|slot| self.probed[usize::from(slot.0)]);
    }
}
