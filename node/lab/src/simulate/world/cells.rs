//! Cells: independent clusters, and the first hop that chooses one for each request.
//!
//! A *place* is the index of a replica. Places and engines are numbered across all cells. The
//! first hop knows a cell's last report and the requests it has sent there since. It chooses a cell
//! by a policy of the product, as a router chooses a backend. Cells may charge users for service in
//! other cells; they exchange nothing else.

use std::ops::Range;
use std::sync::Arc;

use state::command::{Charge, Command, Envelope, Item, Lane, Origin};
use state::ids::{AttemptId, ReplicaId, SessionId, Slot, UserKey};
use state::policy::{Candidate, PolicyRequest, choose};
use xxhash_rust::xxh3::xxh3_64;

use super::{Micros, SimEvent, SimWorld};
use crate::simulate::clock::unix_ms;
use crate::simulate::plan::CellPlan;
use crate::simulate::workload::SimPrompt;

/// State of the first hop: its knowledge of the cells, and the charges that cells share.
pub(super) struct FirstHop {
    /// Number of requests in flight in each cell.
    open: Vec<u32>,
    /// Number of requests in flight in each cell as last reported, plus requests sent there since.
    known: Vec<u32>,
    /// Input and output tokens that each cell has charged each user for service in other cells.
    told: Vec<Vec<[u64; 2]>>,
    /// Number of batches with charges for service in other cells.
    charges: u64,
}

impl FirstHop {
    pub(super) fn new(plan: &CellPlan, users: usize) -> Self {
        let cells = usize::from(plan.count);
        Self {
            open: vec![0; cells],
            known: vec![0; cells],
            told: vec![vec![[0; 2]; users]; cells],
            charges: 0,
        }
    }

    /// Records the end of a request in `cell`.
    pub(super) fn closed(&mut self, cell: usize) {
        self.open[cell] -= 1;
    }
}

impl SimWorld<'_> {
    /// Returns the places of the replicas in `cell`.
    pub(super) fn places_of(&self, cell: usize) -> Range<usize> {
        let replicas = usize::from(self.plan.replicas);
        cell * replicas..(cell + 1) * replicas
    }

    /// Returns the places of the replicas in the same cell as `place`.
    pub(super) fn places_around(&self, place: usize) -> Range<usize> {
        self.places_of(place / usize::from(self.plan.replicas))
    }

    /// Returns the places of the replicas in the cell of `engine`.
    pub(super) fn places_beside(&self, engine: usize) -> Range<usize> {
        self.places_of(engine / usize::from(self.plan.backends))
    }

    /// Returns the engine that has `slot` in the registry of the replica at `place`.
    pub(super) fn engine_at(&self, place: usize, slot: usize) -> usize {
        let cell = place / usize::from(self.plan.replicas);
        cell * usize::from(self.plan.backends) + slot
    }

    /// Chooses a cell for the request with the number `request`, and counts the request there.
    pub(super) fn choose_cell(&mut self, prompt: &SimPrompt, request: usize) -> usize {
        let plan = &self.plan.cells;
        let hashed = prompt.identity.chain.iter();
        let key = hashed.take(plan.hashed_blocks as usize).next_back();
        let asked = PolicyRequest {
            jitter: xxh3_64(&request.to_le_bytes()),
            prefix_key: key.map_or_else(|| xxh3_64(&prompt.identity.tail.bytes), |block| block.0),
            tokens: prompt.tokens,
            turn: request as u64,
            ..PolicyRequest::default()
        };
        let known = (0..plan.count).zip(&self.hop.known);
        let cells = known.map(|(cell, running)| Candidate {
            slot: Slot(cell),
            running: *running,
            ..Candidate::default()
        });
        let cells: Vec<Candidate> = cells.collect();
        let choice = choose(&plan.hop, &asked, &cells).expect("there is a cell");
        let cell = usize::from(choice.slot.0);
        self.hop.open[cell] += 1;
        self.hop.known[cell] += 1;
        cell
    }

    /// Plans the first load report and the first exchange of charges between cells.
    pub(super) fn begin_cells(&mut self) {
        let plan = &self.plan.cells;
        if plan.count > 1 {
            self.events.plan(plan.told_every, SimEvent::Tell);
            if let Some(every) = plan.charges_every {
                self.events.plan(every, SimEvent::Share);
            }
        }
    }

    /// Reports the cells' requests in flight to the first hop, and plans the next report.
    pub(super) fn tell(&mut self) {
        self.hop.known.clone_from(&self.hop.open);
        if self.is_going_on() {
            let at = self.now + self.plan.cells.told_every;
            self.events.plan(at, SimEvent::Tell);
        }
    }

    /// Charges users in each cell for recent service in other cells. Plans the next call.
    pub(super) fn share_charges(&mut self, every: Micros) {
        let cells = usize::from(self.plan.cells.count);
        let users = 0..self.keys.len();
        let own: Vec<Vec<[u64; 2]>> = (0..cells)
            .map(|cell| {
                users
                    .clone()
                    .map(|user| self.own_charges(cell, user))
                    .collect()
            })
            .collect();
        for cell in 0..cells {
            let mut items = Vec::new();
            for user in users.clone() {
                let told = self.hop.told[cell][user];
                let others = (0..cells).filter(|other| *other != cell);
                let all = others.fold([0; 2], |[input, output], other| {
                    let [more_input, more_output] = own[other][user];
                    [input + more_input, output + more_output]
                });
                if all != told {
                    items.push(charge(self.keys[user], told, all));
                    self.hop.told[cell][user] = all;
                }
            }
            if !items.is_empty() {
                self.propose_charges(cell, items);
            }
        }
        if self.is_going_on() {
            self.events.plan(self.now + every, SimEvent::Share);
        }
    }

    /// Returns the input and output tokens that `cell` has charged `user` for its own requests.
    pub(super) fn own_charges(&self, cell: usize, user: usize) -> [u64; 2] {
        let state = &self.places[self.places_of(cell).start].replica.state;
        let [input, output] = self.hop.told[cell][user];
        state.user(self.keys[user]).map_or([0; 2], |user| {
            // Charges from other cells that are not applied yet are missing in the totals.
            let total = &user.total;
            [
                total.input_uncached.saturating_sub(input),
                total.output.saturating_sub(output),
            ]
        })
    }

    fn propose_charges(&mut self, cell: usize, items: Vec<Item>) {
        self.hop.charges += 1;
        let envelope = Arc::new(Envelope {
            origin: Origin {
                replica: ReplicaId(u8::MAX),
                session: SessionId(1),
                lane: Lane::Outbox,
                seq: self.hop.charges,
            },
            proposed_at_ms: unix_ms(self.now),
            command: Command::Batch {
                base_attempt: AttemptId(0),
                items,
            },
        });
        let places = self.places_of(cell);
        let index = self.take_index(places.start);
        for replica in places {
            self.plan_apply(self.plan.cells.lag, replica, index, &envelope);
        }
    }
}

/// Returns the charge that raises the tokens known in a cell from `told` to `all`.
fn charge(user: UserKey, told: [u64; 2], all: [u64; 2]) -> Item {
    Item::Charge(Charge {
        user,
        input_uncached: all[0].saturating_sub(told[0]),
        output: all[1].saturating_sub(told[1]),
        ..Charge::default()
    })
}
