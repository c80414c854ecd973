//! With grants through the log, waiting users are served as from a single queue: the gap between
//! any two stays within 2U.

use proptest::prelude::*;
use state::command::{Charge, Command, Item, UserSpec};
use state::grants::Wait;
use state::ids::{ModelKey, ReplicaId, SessionId, Ticket, UserKey};

use crate::common::{self, Driver};

const MODEL: ModelKey = ModelKey(5);

fn name(user: usize) -> String {
    format!("user-{user}")
}

fn key(user: usize) -> UserKey {
    state::prefix::user_key(common::HASH_SEED, &name(user))
}

/// Users who always wait, each at one replica or at all.
struct Backlog {
    driver: Driver,
    weights: Vec<u64>,
    /// Priced tokens served, by user.
    served: Vec<u64>,
    next_ticket: u64,
    prices: Vec<u32>,
}

impl Backlog {
    fn new(weights: Vec<u64>, prices: Vec<u32>) -> Self {
        let mut driver = Driver::new();
        for (user, weight) in weights.iter().enumerate() {
            let spec = UserSpec {
                name: name(user),
                weight_milli: 1000 * *weight as u32,
            };
            driver.apply(1, Command::PutUser(spec));
        }
        let served = vec![0; weights.len()];
        Self {
            driver,
            weights,
            served,
            next_ticket: 1,
            prices,
        }
    }

    fn wait(&mut self, user: usize, replica: u8) {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let tokens = self.prices[self.next_ticket as usize % self.prices.len()];
        let queued = Charge {
            user: key(user),
            queued: 1,
            ..Charge::default()
        };
        let wait = Wait {
            ticket,
            model: MODEL,
            user: key(user),
            priority: 0,
            tokens,
        };
        let items = vec![Item::Charge(queued), Item::Wait(wait)];
        self.driver.apply(replica, common::batch(items));
    }

    /// Makes one grant; the served user waits again.
    fn grant(&mut self, proposer: u8) {
        let grant = Item::Grant {
            model: MODEL,
            count: 1,
        };
        self.driver.apply(proposer, common::batch(vec![grant]));
        let grants = self.driver.state.view().grants();
        let granted: Vec<(u8, Wait)> = (1..=3)
            .flat_map(|replica| {
                let grants = grants.granted(ReplicaId(replica));
                grants.map(move |wait| (replica, *wait))
            })
            .collect();
        for (replica, wait) in granted {
            let user = (0..self.weights.len()).find(|user| key(*user) == wait.user);
            let user = user.expect("only these wait");
            self.served[user] += u64::from(wait.tokens);
            self.wait(user, replica);
            let ticket = wait.ticket;
            self.driver
                .apply(replica, common::batch(vec![Item::Leave { ticket }]));
        }
    }

    /// Returns the largest difference in service per weight between two users, in thousandths.
    fn gap_milli(&self) -> u64 {
        let normal = |(served, weight): (&u64, &u64)| served * 1000 / weight;
        let normal: Vec<u64> = self.served.iter().zip(&self.weights).map(normal).collect();
        let most = normal.iter().max().expect("there are users");
        most - normal.iter().min().expect("there are users")
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn the_service_gap_equals_that_of_a_single_queue(
        weights in prop::collection::vec(1_u64..5, 2..7),
        prices in prop::collection::vec(1_u32..500, 1..20),
        proposers in prop::collection::vec(1_u8..4, 150..250),
    ) {
        let most = u64::from(*prices.iter().max().unwrap());
        let mut backlog = Backlog::new(weights.clone(), prices);
        for user in 0..weights.len() {
            // Pinned to one replica, two requests each.
            let replica = user as u8 % 3 + 1;
            backlog.wait(user, replica);
            backlog.wait(user, replica);
        }
        for proposer in proposers {
            backlog.grant(proposer);
            prop_assert!(backlog.gap_milli() <= 2 * most * 1000, "{:?}", backlog.served);
        }
        prop_assert_eq!(backlog.driver.state.check(), Ok(()));
    }
}

#[test]
fn a_dead_replicas_grants_go_to_others() {
    let mut backlog = Backlog::new(vec![1, 1], vec![10]);
    backlog.wait(0, 2);
    backlog.wait(1, 3);
    let grant = Item::Grant {
        model: MODEL,
        count: 1,
    };
    backlog.driver.apply(1, common::batch(vec![grant]));
    let granted = |backlog: &Backlog, replica| {
        let grants = backlog.driver.state.view().grants();
        grants.granted(ReplicaId(replica)).count()
    };
    assert_eq!((granted(&backlog, 2), granted(&backlog, 3)), (1, 0));
    let expire = Command::ExpireSession {
        replica: ReplicaId(2),
        session: SessionId(1),
    };
    backlog.driver.apply(1, expire);
    assert_eq!((granted(&backlog, 2), granted(&backlog, 3)), (0, 1));
    assert_eq!(backlog.driver.state.check(), Ok(()));
}
