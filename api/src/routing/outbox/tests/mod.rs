//! Tests the outbox against the real state machine: what it sends, in which order, and that nothing
//! is lost or left open, whatever the outcome of a proposal.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use state::command::{
    Charge, Command, Committed, EngineFacts, Item, LeaseOutcome, Rejection, Reply,
};
use state::ids::{AttemptId, BlockHash, LogIndex, ReplicaId, SessionId, UserKey};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::driver::{DriverMetrics, OutboxDriver, SharedOutbox};
use super::outcome::AfterProposal;
use super::overlay::Overlay;
use super::steps::RUN_BLOCKS_MAX;
use super::{CHARGED_USERS_MAX, ChargeKey, OVERFLOW_USER, Outbox, OutboxSettings};
use crate::base::clock::Clock;
use crate::ports::ProposeError;
use crate::routing::fixture::{Fault, Log, Port};

mod charges;
mod commits;
mod driver;

const KEEP: LeaseOutcome = LeaseOutcome::Kept;

fn outbox(settings: OutboxSettings) -> Outbox {
    Outbox::new(
        ReplicaId(1),
        SessionId(1),
        settings,
        Arc::new(Overlay::default()),
    )
}

fn chain(hashes: impl IntoIterator<Item = u64>) -> Arc<[BlockHash]> {
    hashes.into_iter().map(BlockHash).collect()
}

fn user(name: &str) -> UserKey {
    state::prefix::user_key(7, name)
}

/// Returns the next items as text, with the envelope's number. The envelope stays outstanding.
fn cut(outbox: &mut Outbox) -> Vec<String> {
    let envelope = outbox
        .cut(Instant::now(), 5)
        .expect("something waits")
        .clone();
    let Command::Batch {
        base_attempt,
        items,
    } = envelope.command
    else {
        unreachable!()
    };
    let name = |attempt: u32| base_attempt.0 + u64::from(attempt);
    let show = |item: Item| match item {
        Item::Acquire {
            attempt, tip, new, ..
        } => {
            let tip = tip.map(|tip| tip.0);
            format!("{} acquires {tip:?}+{}", name(attempt), new.len())
        }
        Item::Materialize { attempt, new } => format!("{} extends {}", name(attempt), new.len()),
        Item::Release { attempt, outcome } => format!("{} ends {outcome:?}", name(attempt)),
        Item::DefineUser { name, .. } => format!("user {name}"),
        Item::Charge(it) => format!("charge {}+{}+{}", it.input_uncached, it.output, it.started),
        Item::ObserveEngine { facts, .. } => format!("facts {:?}", facts.capacity_blocks),
        Item::KvEvents(_)
        | Item::ObserveService(_)
        | Item::ObserveOutputs { .. }
        | Item::ObserveText(_)
        | Item::ObserveDemand(_)
        | Item::ObserveBlockSize { .. }
        | Item::ObserveBelief(_)
        | Item::BeginSession(_)
        | Item::MoveSession { .. }
        | Item::EndTurn(_)
        | Item::EndSession(_)
        | Item::DefineSource(_)
        | Item::ChargeStream(_) => format!("note {item:?}"),
    };
    items.into_iter().map(show).collect()
}

fn deliver(outbox: &mut Outbox, log: &mut Log) -> Reply {
    let envelope = outbox
        .outstanding()
        .expect("an envelope is outstanding")
        .clone();
    let committed = log.apply(envelope);
    let reply = committed.reply.clone();
    assert_eq!(
        outbox.handle_outcome(Ok(committed)),
        AfterProposal::Continue
    );
    outbox.settle(log.state.applied());
    reply
}

#[test]
fn outbox_items_are_sent_once_in_order() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    assert!(outbox.cut(Instant::now(), 5).is_none());
    let (at, blocks) = (log.handle(0), chain([1, 2, 3]));
    outbox.name_user(user("ada"), "ada");
    outbox.name_user(user("ada"), "ada");
    outbox.charge(Charge {
        user: user("ada"),
        started: 1,
        ..Charge::default()
    });
    outbox.charge(Charge {
        user: user("ada"),
        input_uncached: 5,
        output: 2,
        ..Charge::default()
    });
    outbox.acquire(AttemptId(9), at, &blocks, 0);
    outbox.extend(AttemptId(9), vec![BlockHash(4)]);
    outbox.extend(AttemptId(9), Vec::new());
    outbox.observe(
        at,
        EngineFacts {
            capacity_blocks: Some(10),
            ..EngineFacts::default()
        },
    );
    outbox.observe(
        at,
        EngineFacts {
            started_at_s: Some(1),
            ..EngineFacts::default()
        },
    );
    assert_eq!(
        cut(&mut outbox),
        [
            "user ada",
            "charge 5+2+1",
            "facts Some(10)",
            "9 acquires None+3",
            "9 extends 1"
        ]
    );
    assert!(
        outbox.cut(Instant::now(), 6).is_none(),
        "one is outstanding"
    );
    outbox.release(AttemptId(9), KEEP);
    deliver(&mut outbox, &mut log);
    assert_eq!(log.state.open_leases(), 1);
    assert_eq!(cut(&mut outbox), ["9 ends Kept"]);
    deliver(&mut outbox, &mut log);
    assert!(outbox.is_empty() && outbox.leases.is_empty() && outbox.overlay.is_empty());
    assert_eq!(
        outbox.status(Instant::now()),
        super::OutboxStatus::default()
    );
    assert_eq!(
        (log.state.open_leases(), log.state.owned_blocks(at.slot)),
        (0, 4)
    );
}

#[test]
fn an_envelope_of_unknown_outcome_is_proposed_again_unchanged() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    outbox.charge(Charge {
        user: user("ada"),
        output: 3,
        ..Charge::default()
    });
    cut(&mut outbox);
    let first = outbox.outstanding().unwrap().clone();
    for failure in [
        ProposeError::Unavailable(String::new()),
        ProposeError::Unknown(String::new()),
    ] {
        let next = outbox.handle_outcome(Err(failure));
        assert!(matches!(next, AfterProposal::Retry(_)));
        assert_eq!(outbox.outstanding(), Some(&first));
    }
    log.apply(first);
    assert!(matches!(deliver(&mut outbox, &mut log), Reply::Repeated(_)));
    assert_eq!(log.state.user(user("ada")).unwrap().total.output, 3);
    outbox.charge(Charge {
        user: user("ada"),
        output: 4,
        ..Charge::default()
    });
    cut(&mut outbox);
    assert_eq!(outbox.outstanding().unwrap().origin.seq, 2);
    assert_eq!(
        outbox.handle_outcome(Err(ProposeError::Stopping)),
        AfterProposal::Stop
    );
}

#[test]
fn a_refused_sequence_number_is_not_reused() {
    let mut outbox = outbox(OutboxSettings::default());
    outbox.charge(Charge {
        user: user("ada"),
        output: 3,
        ..Charge::default()
    });
    cut(&mut outbox);
    let reject = |reject| {
        Ok(Committed {
            index: LogIndex(1),
            reply: Reply::Rejected(reject),
        })
    };
    let next = outbox.handle_outcome(reject(Rejection::NotInitialised));
    assert!(matches!(next, AfterProposal::Retry(_)));
    let origin = outbox.outstanding().unwrap().origin;
    assert_eq!((origin.session, origin.seq), (SessionId(1), 2));
    let stale = Rejection::StaleSession {
        replica: ReplicaId(1),
    };
    assert_eq!(outbox.handle_outcome(reject(stale)), AfterProposal::Renewed);
    let origin = outbox.outstanding().unwrap().origin;
    assert_eq!((origin.session, origin.seq), (SessionId(1).successor(), 1));
    let invalid = Rejection::TooManyBackends;
    let next = outbox.handle_outcome(reject(invalid));
    assert!(matches!(next, AfterProposal::Refused(_)));
    assert_eq!(outbox.status(Instant::now()).dropped, 1);
}

#[test]
fn users_are_named_again_after_a_restore_or_deletion() {
    let mut outbox = outbox(OutboxSettings::default());
    let mut named = |since: Option<u64>| {
        outbox.follow_names(since.map(LogIndex));
        outbox.payer(7, "ada");
        let named = outbox.names.len();
        outbox.names.clear();
        named
    };
    let at = [None, None, Some(9), Some(9), Some(12), None];
    assert_eq!(at.map(&mut named), [1, 0, 1, 0, 1, 1]);
}

#[test]
fn users_beyond_the_bound_share_one_account() {
    let mut outbox = outbox(OutboxSettings::default());
    let started = |outbox: &mut Outbox, name: &str| {
        let user = outbox.payer(7, name);
        outbox.charge(Charge {
            user,
            started: 1,
            ..Charge::default()
        });
        user
    };
    for i in 0..CHARGED_USERS_MAX {
        assert_eq!(started(&mut outbox, &i.to_string()), user(&i.to_string()));
    }
    assert_eq!(started(&mut outbox, "new"), user(OVERFLOW_USER));
    assert_eq!(started(&mut outbox, "newer"), user(OVERFLOW_USER));
    assert_eq!(started(&mut outbox, "5"), user("5"));
    // A charge that began before the others is still settled under its own user.
    outbox.charge(Charge {
        user: user("earlier"),
        ended: 1,
        ..Charge::default()
    });
    let queued = |name| outbox.charges[&ChargeKey::of_user(user(name))].charge;
    assert_eq!(queued(OVERFLOW_USER).started, 2);
    assert_eq!(queued("earlier").ended, 1);
    assert_eq!(outbox.status(Instant::now()).dropped, 0);
}

#[test]
fn no_users_charge_waits_forever() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    let users: Vec<UserKey> = (0..1000).map(|i| user(&i.to_string())).collect();
    for _ in 0..4 {
        for user in &users {
            outbox.charge(Charge {
                user: *user,
                output: 1,
                ..Charge::default()
            });
        }
        outbox.cut(Instant::now(), 5).expect("something waits");
        deliver(&mut outbox, &mut log);
    }
    for user in users {
        assert!(
            log.state
                .user(user)
                .is_some_and(|user| user.total.output > 0)
        );
    }
}

#[test]
fn long_prompts_are_sent_in_parts_that_fit() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    let blocks = chain(1..=20_000);
    outbox.acquire(AttemptId(1), log.handle(0), &blocks, 0);
    outbox.release(AttemptId(1), KEEP);
    let mut envelopes = 0;
    while outbox.cut(Instant::now(), 5).is_some() {
        deliver(&mut outbox, &mut log);
        envelopes += 1;
    }
    assert_eq!(
        envelopes, 3,
        "runs of {RUN_BLOCKS_MAX} blocks, two per envelope"
    );
    assert_eq!(log.state.owned_blocks(log.handle(0).slot), 20_000);
    assert_eq!(log.state.open_leases(), 0);
    assert!(outbox.overlay.is_empty());
}

#[test]
fn full_envelopes_of_every_kind_fit_a_command() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    for i in 0..3000 {
        let name = format!("{i}-{}", "n".repeat(250));
        let key = user(&name);
        outbox.name_user(key, &name);
        outbox.charge(Charge {
            user: key,
            input_uncached: u64::MAX >> 20,
            input_cached: u64::MAX >> 20,
            output: u64::MAX >> 20,
            started: 1,
            ended: 1,
            ..Charge::default()
        });
        outbox.acquire(AttemptId(i), log.handle(0), &chain([i + 1]), 0);
        outbox.release(AttemptId(i), KEEP);
    }
    let models = (0..200)
        .map(|i| format!("{i}{}", "m".repeat(200)))
        .collect();
    let facts = EngineFacts {
        models: Some(models),
        ..EngineFacts::default()
    };
    outbox.observe(log.handle(0), facts.clone());
    while outbox.cut(Instant::now(), 5).is_some() {
        deliver(&mut outbox, &mut log);
    }
    assert_eq!(log.state.users_len(), 3000);
    assert_eq!(log.state.open_leases(), 0);
    assert_eq!(log.state.owned_blocks(log.handle(0).slot), 3000);
    assert!(outbox.is_empty());
}

#[test]
fn a_missing_tip_resends_the_whole_chain_first() {
    let mut log = Log::new(&[None]);
    let mut outbox = outbox(OutboxSettings::default());
    let (at, blocks) = (log.handle(0), chain([1, 2, 3, 4]));
    outbox.acquire(AttemptId(1), at, &blocks, 2);
    outbox.acquire(AttemptId(2), at, &blocks, 4);
    outbox.extend(AttemptId(2), vec![BlockHash(5)]);
    outbox.release(AttemptId(2), KEEP);
    outbox.acquire(AttemptId(3), at, &blocks, 3);
    outbox.release(AttemptId(3), LeaseOutcome::Discarded);
    assert_eq!(cut(&mut outbox).len(), 6);
    outbox.extend(AttemptId(1), vec![BlockHash(6)]);
    outbox.acquire(AttemptId(4), at, &chain([9]), 0);
    deliver(&mut outbox, &mut log);
    assert_eq!(
        cut(&mut outbox),
        [
            "1 acquires None+5",
            "2 acquires None+5",
            "2 ends Kept",
            "4 acquires None+1"
        ]
    );
    outbox.release(AttemptId(1), KEEP);
    outbox.release(AttemptId(4), KEEP);
    deliver(&mut outbox, &mut log);
    assert_eq!(cut(&mut outbox), ["1 ends Kept", "4 ends Kept"]);
    deliver(&mut outbox, &mut log);
    assert!(outbox.overlay.is_empty() && outbox.leases.is_empty() && outbox.is_empty());
    assert_eq!(
        (log.state.open_leases(), log.state.owned_blocks(at.slot)),
        (0, 7)
    );
}

#[test]
fn the_oldest_unsent_attempts_are_dropped_beyond_the_bound() {
    let mut log = Log::new(&[None]);
    let settings = OutboxSettings {
        queued_items_max: 6,
        ..OutboxSettings::default()
    };
    let mut outbox = outbox(settings);
    let at = log.handle(0);
    outbox.acquire(AttemptId(1), at, &chain([1]), 0);
    cut(&mut outbox);
    for id in 2..=6 {
        outbox.acquire(AttemptId(id), at, &chain([id]), 0);
        outbox.release(AttemptId(id), KEEP);
        outbox.charge(Charge {
            user: user("ada"),
            started: 1,
            ended: 1,
            ..Charge::default()
        });
    }
    outbox.release(AttemptId(1), KEEP);
    outbox.acquire(AttemptId(7), at, &chain([7]), 0);
    assert_eq!(outbox.status(Instant::now()).dropped, 6);
    deliver(&mut outbox, &mut log);
    let left = [
        "charge 0+0+5",
        "5 acquires None+1",
        "5 ends Kept",
        "6 acquires None+1",
        "6 ends Kept",
        "1 ends Kept",
        "7 acquires None+1",
    ];
    assert_eq!(cut(&mut outbox), left);
    deliver(&mut outbox, &mut log);
    // An attempt that was forgotten while open is never mentioned again.
    let mut few = self::outbox(OutboxSettings {
        queued_items_max: 0,
        ..settings
    });
    few.acquire(AttemptId(8), at, &chain([8]), 0);
    few.extend(AttemptId(8), vec![BlockHash(10)]);
    few.release(AttemptId(8), KEEP);
    assert!(few.is_empty() && few.cut(Instant::now(), 5).is_none());
    few.sweep();
    assert!(few.overlay.is_empty() && few.steps.is_empty());
}

/// One event of the property test of the outbox.
#[derive(Debug, Clone)]
enum Event {
    Start {
        prompt: Vec<u64>,
        matched: usize,
        backend: u16,
    },
    Output {
        open: usize,
        blocks: u64,
    },
    End {
        open: usize,
        is_kept: bool,
    },
    Flush(Option<Fault>),
}

fn event() -> impl Strategy<Value = Event> {
    let fault = prop_oneof![
        4 => Just(None),
        1 => Just(Some(Fault::Refused)),
        1 => Just(Some(Fault::AnswerLost)),
        1 => Just(Some(Fault::Lost)),
    ];
    prop_oneof![
        4 => (proptest::collection::vec(0_u64..3, 0..6), 0_usize..7, 0_u16..2)
            .prop_map(|(prompt, matched, backend)| Event::Start { prompt, matched, backend }),
        2 => (0_usize..8, 1_u64..4).prop_map(|(open, blocks)| Event::Output { open, blocks }),
        3 => (0_usize..8, any::<bool>()).prop_map(|(open, is_kept)| Event::End { open, is_kept }),
        3 => fault.prop_map(Event::Flush),
    ]
}

/// Returns the chain of a prompt of small digits. Prompts with the same start share blocks.
fn chained(prompt: &[u64]) -> Vec<BlockHash> {
    let step = |link: &mut u64, digit: &u64| {
        *link = xxhash_rust::xxh3::xxh3_64_with_seed(&digit.to_le_bytes(), *link);
        Some(BlockHash(*link))
    };
    prompt.iter().scan(1, step).collect()
}

struct Run {
    outbox: Outbox,
    port: Port,
    open: Vec<(AttemptId, BlockHash)>,
    started: u64,
}

impl Run {
    fn step(&mut self, event: Event) {
        match event {
            Event::Start {
                prompt,
                matched,
                backend,
            } => {
                self.started += 1;
                let id = AttemptId(self.started);
                let chain: Arc<[BlockHash]> = chained(&prompt).into();
                let at = self.port.log.lock().unwrap().handle(backend);
                self.outbox
                    .acquire(id, at, &chain, matched.min(chain.len()));
                self.outbox.charge(Charge {
                    user: user("u"),
                    started: 1,
                    ..Charge::default()
                });
                self.open
                    .push((id, chain.last().copied().unwrap_or(BlockHash(1))));
            }
            Event::Output { open, blocks } => {
                if let Some((id, last)) = self.open.get_mut(open) {
                    let next = |n| BlockHash(last.0.wrapping_mul(31).wrapping_add(n));
                    let blocks: Vec<_> = (0..blocks).map(next).collect();
                    *last = blocks[blocks.len() - 1];
                    self.outbox.extend(*id, blocks);
                }
            }
            Event::End { open, is_kept } => {
                if open < self.open.len() {
                    let (id, _) = self.open.remove(open);
                    let outcome = if is_kept {
                        KEEP
                    } else {
                        LeaseOutcome::Discarded
                    };
                    self.outbox.release(id, outcome);
                    self.outbox.charge(Charge {
                        user: user("u"),
                        ended: 1,
                        ..Charge::default()
                    });
                }
            }
            Event::Flush(fault) => {
                self.port.faults.lock().unwrap().extend(fault);
                self.flush();
            }
        }
    }

    fn flush(&mut self) -> bool {
        if self.outbox.outstanding().is_none() && self.outbox.cut(Instant::now(), 5).is_none() {
            return false;
        }
        let outcome = self.port.answer(self.outbox.outstanding().unwrap().clone());
        self.outbox.handle_outcome(outcome);
        self.outbox
            .settle(self.port.log.lock().unwrap().state.applied());
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_attempt_is_closed_under_any_failure(
        events in proptest::collection::vec(event(), 0..80),
        capacity in prop_oneof![Just(None), (1_u32..8).prop_map(Some)],
        queued_items_max in prop_oneof![Just(1_000_usize), 1_usize..12],
    ) {
        let settings = OutboxSettings { queued_items_max, ..OutboxSettings::default() };
        let port = Port::new(Log::new(&[capacity, None]));
        let mut run = Run { outbox: outbox(settings), port, open: Vec::new(), started: 0 };
        for event in events {
            run.step(event);
            let status = run.outbox.status(Instant::now());
            prop_assert!(run.outbox.queued.items <= run.outbox.steps.len(), "{status:?}");
        }
        while !run.open.is_empty() {
            run.step(Event::End { open: 0, is_kept: true });
        }
        while run.flush() {}
        prop_assert!(run.outbox.leases.is_empty() && run.outbox.steps.is_empty());
        prop_assert!(run.outbox.overlay.is_empty() && run.outbox.unsent.is_empty());
        prop_assert_eq!(run.outbox.queued, super::QueuedSize::default());
        let log = run.port.log.lock().unwrap();
        prop_assert_eq!(log.state.open_leases(), 0);
        prop_assert_eq!(log.state.check(), Ok(()));
        if let Some(user) = log.state.user(user("u")) {
            prop_assert_eq!((user.in_flight, user.total.requests), (0, run.started));
        }
    }
}
