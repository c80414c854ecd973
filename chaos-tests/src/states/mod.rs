//! Three states and a log that is made up: what [`crate::sim`] does with whole replicas, without
//! network, clock or Raft.
//!
//! Proposers dispatch, finish, crash and repeat themselves, operators write, engines publish their
//! caches badly, states lag, and are rebuilt from one another's snapshots. What comes of it is written
//! down as a [`RunRecord`] and judged by the same [`invariants`](crate::invariants). A seed takes
//! milliseconds, so that a fault of the replicated state is found in seconds. One seed decides
//! everything.

mod engine;
mod operator;
mod proposer;

use std::collections::BTreeSet;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use state::RouterState;
use state::command::{Command, Envelope, Reply};
use state::ids::{BlockHash, LogIndex, ReplicaId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::engine::EngineLife;
use self::proposer::Proposer;
use crate::invariants::{PropertyError, Subjects, check_all, sound_state};
use crate::oracle::RunRecord;
use crate::oracle::image::StateImage;
use crate::oracle::observation::{AtRest, ReplicaRun};
use crate::oracle::register::RegisterKey;

/// Replicas, of which each proposes, too.
const REPLICAS: u8 = 3;
/// Unix time at the start, milliseconds.
const EPOCH_MS: u64 = 1_700_000_000_000;
/// Conversations that prompts are beginnings of.
const CONVERSATIONS: u64 = 7;
/// Entries between two looks at a whole state.
const CHECK_EVERY: u64 = 8;
/// Steps between two images.
const IMAGE_EVERY: u32 = 40;
/// Rounds of quiet at the end, in which all that is open ends.
const QUIET_ROUNDS: u32 = 4;

/// The states and all that happens to them.
struct StateCluster {
    rng: StdRng,
    /// Draws what clocks show, so that all else stays as it is drawn.
    clocks: StdRng,
    now_us: u64,
    /// Envelopes, encoded; the first has index 1.
    log: Vec<Arc<[u8]>>,
    replicas: Vec<StateReplica>,
    proposers: Vec<Proposer>,
    engines: Vec<EngineLife>,
    /// What the operators wrote.
    keys: BTreeSet<RegisterKey>,
    record: RunRecord,
}

/// One state.
struct StateReplica {
    run: ReplicaRun,
    state: RouterState,
}

/// Plays so many steps from a seed and judges them; answers how many things each invariant looked at,
/// in the order of [`crate::invariants::ALL`].
///
/// # Errors
/// The first invariant that does not hold.
pub fn run(seed: u64, steps: u32) -> Result<Vec<Subjects>, PropertyError> {
    let mut states = StateCluster::new(seed)?;
    for step in 1..=steps {
        states.step()?;
        if step.is_multiple_of(IMAGE_EVERY) {
            states.image();
        }
    }
    states.quieten()?;
    check_all(&states.record)
}

impl StateCluster {
    fn new(seed: u64) -> Result<Self, PropertyError> {
        let mut rng = StdRng::seed_from_u64(seed);
        let clocks = StdRng::seed_from_u64(!seed);
        let mut record = RunRecord::default();
        let run = |id| ReplicaRun {
            replica: ReplicaId(id),
            number: 1,
        };
        let replicas = (1..=REPLICAS).map(|id| {
            record.observation.started(0, run(id));
            StateReplica {
                run: run(id),
                state: RouterState::new(),
            }
        });
        let replicas = replicas.collect();
        let proposers = (1..=REPLICAS).map(|id| Proposer::new(ReplicaId(id), &mut rng));
        let proposers = proposers.collect();
        let mut states = Self {
            rng,
            clocks,
            now_us: 0,
            log: Vec::new(),
            replicas,
            proposers,
            engines: Vec::new(),
            keys: BTreeSet::from([RegisterKey::Policy]),
            record,
        };
        states.found()?;
        Ok(states)
    }

    /// One thing happens, then every state may go on.
    fn step(&mut self) -> Result<(), PropertyError> {
        self.now_us += self.rng.random_range(1_000..60_000);
        let who = self.rng.random_range(0..self.proposers.len());
        if self.clocks.random_range(0..20) == 0 {
            self.turn_clocks(who);
        }
        match self.rng.random_range(0..100) {
            0..55 => self.flush(who, false)?,
            55..63 => self.operate(who)?,
            63..68 => self.read(who)?,
            68..78 => self.repeat(),
            78..82 => self.restart(who)?,
            82..85 => self.expire(who)?,
            85..90 => self.send_snapshot()?,
            _ => self.publish(who)?,
        }
        for at in 0..self.replicas.len() {
            let behind = self.log.len() as u64 - self.replicas[at].state.applied().0;
            let most = self.rng.random_range(0..=behind);
            for _ in 0..most {
                self.apply_next(at)?;
            }
        }
        Ok(())
    }

    /// What is open ends, everybody catches up.
    fn quieten(&mut self) -> Result<(), PropertyError> {
        for _ in 0..QUIET_ROUNDS {
            for who in 0..self.proposers.len() {
                self.now_us += 10_000;
                self.flush(who, true)?;
            }
        }
        for at in 0..self.replicas.len() {
            self.catch_up(at)?;
            let StateReplica { run, state } = &self.replicas[at];
            // Of an outbox and what is around it nothing is left: there is none.
            let at_rest = AtRest {
                run: *run,
                image: Arc::new(StateImage::of(state, &self.keys)),
                outbox_items: 0,
                overlay_blocks: 0,
                in_flight: 0,
            };
            let observation = &mut self.record.observation;
            observation.at_rest.insert(run.replica, at_rest);
        }
        Ok(())
    }

    /// Puts a command into the log and has its proposer see what came of it.
    fn propose(
        &mut self,
        who: usize,
        envelope: &Envelope,
    ) -> Result<(LogIndex, Reply), PropertyError> {
        self.log
            .push(state::codec::encode_envelope(envelope).into());
        let reply = self.catch_up(who)?;
        let reply = reply.expect("the proposed entry was not applied before");
        Ok((LogIndex(self.log.len() as u64), reply))
    }

    /// Applies the whole log at one state; answers the last reply.
    fn catch_up(&mut self, at: usize) -> Result<Option<Reply>, PropertyError> {
        let mut reply = None;
        while (self.replicas[at].state.applied().0 as usize) < self.log.len() {
            reply = Some(self.apply_next(at)?);
        }
        Ok(reply)
    }

    fn apply_next(&mut self, at: usize) -> Result<Reply, PropertyError> {
        let StateReplica { run, state } = &mut self.replicas[at];
        let index = state.applied().0 + 1;
        let bytes = Arc::clone(&self.log[index as usize - 1]);
        let envelope = state::codec::decode_envelope(&bytes);
        let envelope = envelope.expect("what was encoded can be decoded");
        let reply = state.apply(LogIndex(index), envelope);
        let digest = Some(state.digest());
        let observation = &mut self.record.observation;
        observation.applied(self.now_us, *run, index, Some(&bytes), digest);
        if index.is_multiple_of(CHECK_EVERY) {
            sound_state::check(*run, state)?;
        }
        Ok(reply)
    }

    /// A state that lags is replaced by another one.
    fn send_snapshot(&mut self) -> Result<(), PropertyError> {
        let from = self.rng.random_range(0..self.replicas.len());
        let to = self.rng.random_range(0..self.replicas.len());
        let reach = |at: usize| self.replicas[at].state.applied();
        if from == to || reach(from) < reach(to) {
            return Ok(());
        }
        let bytes = self.frozen(from);
        self.restore(to, &bytes)
    }

    fn frozen(&self, at: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let written = self.replicas[at].state.freeze().write_to(&mut bytes);
        written.expect("writing into memory cannot fail");
        bytes
    }

    fn restore(&mut self, at: usize, bytes: &[u8]) -> Result<(), PropertyError> {
        let StateReplica { run, state } = &mut self.replicas[at];
        state.restore(&mut &*bytes).map_err(|error| PropertyError {
            number: "I10",
            name: "a snapshot that was written can be read",
            detail: format!("{run}: {error}"),
        })?;
        let (index, digest) = (state.applied().0, Some(state.digest()));
        let observation = &mut self.record.observation;
        observation.restored(self.now_us, *run, index, digest);
        sound_state::check(*run, state)
    }

    /// A replica crashes and comes back with what its snapshot holds.
    fn restart(&mut self, who: usize) -> Result<(), PropertyError> {
        let bytes = self.frozen(who);
        let replica = &mut self.replicas[who];
        self.record.observation.ended(self.now_us, replica.run);
        replica.run.number += 1;
        replica.state = RouterState::new();
        self.record.observation.started(self.now_us, replica.run);
        self.proposers[who].restart(&mut self.rng);
        self.restore(who, &bytes)
    }

    /// A command that was proposed before arrives once more.
    fn repeat(&mut self) {
        let latest = self.log.len();
        // Not the first one, which forms the cluster.
        if latest > 1 {
            let back = self.rng.random_range(1..12).min(latest - 1);
            self.log.push(Arc::clone(&self.log[latest - back]));
        }
    }

    fn image(&mut self) {
        let at = self.rng.random_range(0..self.replicas.len());
        let StateReplica { run, state } = &self.replicas[at];
        let image = StateImage::of(state, &self.keys);
        self.record.observation.image(self.now_us, *run, image);
    }

    /// One clock, or all of them, are set wrong by hours or days, or right again.
    fn turn_clocks(&mut self, who: usize) {
        let error_ms = [0, 0, 2, -2, 50, -50][self.clocks.random_range(0..6)] * 3_600_000;
        let is_all = self.clocks.random();
        for (at, proposer) in self.proposers.iter_mut().enumerate() {
            if is_all || at == who {
                proposer.clock_error_ms = error_ms;
            }
        }
        self.record.observation.are_clocks_doubted = true;
    }

    /// What proposers stamp commands with.
    fn unix_ms(&self, who: usize) -> u64 {
        let right = EPOCH_MS + self.now_us / 1000;
        right.saturating_add_signed(self.proposers[who].clock_error_ms)
    }

    /// An envelope of the outbox's or the admin lane.
    fn envelope(&mut self, who: usize, command: Command) -> Envelope {
        let proposed_at_ms = self.unix_ms(who);
        let is_batch = matches!(command, Command::Batch { .. });
        Envelope {
            origin: self.proposers[who].next_origin(is_batch),
            proposed_at_ms,
            command,
        }
    }
}

/// The first blocks of a conversation, by the router's hashes.
fn conversation(number: u64, blocks: usize) -> Vec<BlockHash> {
    let mut link = number + 1;
    let step = |at: usize| {
        // Two conversations each begin alike.
        let own = if at < 2 { number / 2 } else { number };
        let from = if at == 0 { 7 } else { link };
        link = xxh3_64_with_seed(&(at as u64).to_le_bytes(), from ^ (own << 32));
        BlockHash(link)
    };
    (0..blocks).map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_of_a_pair_share_their_beginning_only() {
        let (one, other) = (conversation(2, 5), conversation(3, 5));
        assert_eq!(one[..2], other[..2]);
        assert!(one[2..].iter().zip(&other[2..]).all(|(a, b)| a != b));
        assert_ne!(one[0], conversation(4, 1)[0]);
        assert_eq!(conversation(2, 3), one[..3]);
    }
}
