//! Tests of the table of sessions against a model, of its image, and of its items' size.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::codec::item_bytes;
use crate::command::Item;
use crate::ids::{Incarnation, Slot};

const MAX: usize = 6;
const STEP_MS: u64 = SESSION_IDLE_MS / 8;

fn home(slot: u16) -> BackendRef {
    BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(1),
    }
}

fn new_session(key: u64, parent: Option<u64>, slot: u16) -> NewSession {
    NewSession {
        key: AgentSessionKey(key),
        parent: parent.map(AgentSessionKey),
        user: UserKey(key % 2),
        model: ModelKey(7),
        home: home(slot),
    }
}

fn usage(tokens: u64) -> TurnUsage {
    TurnUsage {
        input_uncached: tokens,
        input_cached: 10 * tokens,
        output: 1,
    }
}

/// One change, or the passing of time.
#[derive(Debug, Clone)]
enum Step {
    Begin(u64, Option<u64>, u16),
    Move(u64, u16),
    Turn(u64, u64),
    End(u64),
    EndTree(u64),
    ForgetUser(u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0_u64..10;
    prop_oneof![
        4 => (key(), prop::option::of(key()), 0_u16..3)
            .prop_map(|(key, parent, slot)| Step::Begin(key, parent, slot)),
        2 => (key(), 0_u16..3).prop_map(|(key, slot)| Step::Move(key, slot)),
        4 => (key(), 0_u64..1000).prop_map(|(key, tokens)| Step::Turn(key, tokens)),
        1 => key().prop_map(Step::End),
        1 => key().prop_map(Step::EndTree),
        1 => (0_u64..2).prop_map(Step::ForgetUser),
        2 => (0_u64..6).prop_map(Step::Pass),
    ]
}

/// A session as the model keeps it: by name alone, without places or orders.
#[derive(Debug, Clone, PartialEq)]
struct ModelSession {
    root: u64,
    user: u64,
    home: BackendRef,
    used_ms: u64,
    turns: u32,
    usage: TurnUsage,
}

/// The table in its simplest form.
#[derive(Default)]
struct Model {
    sessions: BTreeMap<u64, ModelSession>,
    /// Turns and usage of trees, which outlive their sessions' own.
    trees: BTreeMap<u64, (u64, TurnUsage)>,
}

impl Model {
    fn begin(&mut self, key: u64, parent: Option<u64>, slot: u16, now_ms: u64) {
        if self.sessions.contains_key(&key) {
            return self.touch(key, now_ms, |it| it.home = home(slot));
        }
        // The parent may be the one that makes room.
        let parent = parent.filter(|it| *it != key);
        let root = parent.map_or(key, |it| self.sessions.get(&it).map_or(it, |it| it.root));
        if self.sessions.len() == MAX {
            let idlest = self
                .sessions
                .iter()
                .min_by_key(|(key, it)| (it.used_ms, **key));
            let (idlest, _) = idlest.expect("a full table has sessions");
            self.end(*idlest);
        }
        self.trees.entry(root).or_default();
        let session = ModelSession {
            root,
            user: key % 2,
            home: home(slot),
            used_ms: now_ms,
            turns: 0,
            usage: TurnUsage::default(),
        };
        self.sessions.insert(key, session);
    }

    fn touch(&mut self, key: u64, now_ms: u64, change: impl FnOnce(&mut ModelSession)) {
        if let Some(session) = self.sessions.get_mut(&key) {
            change(session);
            session.used_ms = session.used_ms.max(now_ms);
        }
    }

    fn turn(&mut self, key: u64, turn: &TurnUsage, now_ms: u64) {
        if let Some(session) = self.sessions.get(&key) {
            let tree = self.trees.entry(session.root).or_default();
            tree.0 += 1;
            tree.1.add(turn);
        }
        self.touch(key, now_ms, |it| {
            it.turns += 1;
            it.usage.add(turn);
        });
    }

    fn end(&mut self, key: u64) {
        self.sessions.remove(&key);
        let sessions = &self.sessions;
        self.trees
            .retain(|root, _| sessions.values().any(|it| it.root == *root));
    }

    fn end_all(&mut self, which: impl Fn(&ModelSession) -> bool) {
        let keys: Vec<u64> = self.sessions.keys().copied().collect();
        for key in keys {
            if which(&self.sessions[&key]) {
                self.end(key);
            }
        }
    }
}

fn run(table: &mut Trees, model: &mut Model, steps: Vec<Step>) {
    let mut now_ms = 1_000_000;
    for step in steps {
        let view = table.published();
        // Half of the proposers have applied the session's beginning.
        let name = |key: u64| {
            let session = view.session(AgentSessionKey(key))?;
            let by_key = SessionRef::Key(AgentSessionKey(key));
            let by_place = SessionRef::Place(session.place(AgentSessionKey(key)));
            Some(if now_ms % 2 == 0 { by_key } else { by_place })
        };
        match step {
            Step::Begin(key, parent, slot) => {
                table.begin(&new_session(key, parent, slot), now_ms);
                model.begin(key, parent, slot, now_ms);
            }
            Step::Move(key, slot) => {
                name(key).map(|it| table.relocate(it, home(slot), now_ms));
                model.touch(key, now_ms, |it| it.home = home(slot));
            }
            Step::Turn(key, tokens) => {
                let (session, usage) = (name(key), usage(tokens));
                session.map(|session| table.turn(&SessionTurn { session, usage }, now_ms));
                model.turn(key, &usage, now_ms);
            }
            Step::End(key) => {
                name(key).map(|it| table.end_named(it));
                model.end(key);
            }
            Step::EndTree(root) => {
                table.end_tree(AgentSessionKey(root));
                model.end_all(|it| it.root == root);
            }
            Step::ForgetUser(user) => {
                table.forget_user(UserKey(user));
                model.end_all(|it| it.user == user);
            }
            Step::Pass(steps) => {
                now_ms += steps * STEP_MS + 1;
                table.forget_idle(now_ms);
                model.end_all(|it| it.used_ms + SESSION_IDLE_MS <= now_ms);
            }
        }
    }
}

fn seen(table: &Trees) -> (BTreeMap<u64, ModelSession>, BTreeMap<u64, (u64, TurnUsage)>) {
    let session = |(key, it): (AgentSessionKey, &AgentSession)| {
        let session = ModelSession {
            root: it.root.0,
            user: it.user.0,
            home: it.home,
            used_ms: it.used_ms,
            turns: it.turns,
            usage: it.usage,
        };
        (key.0, session)
    };
    let view = table.published();
    let sessions = view.sessions().map(session).collect();
    let trees = table.trees.iter();
    let trees = trees.map(|(root, it)| (root.0, (it.turns, it.usage)));
    (sessions, trees.collect())
}

proptest! {
    #[test]
    fn sessions_and_trees_equal_a_model_without_places_and_orders(
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let mut table = Trees::with_max(MAX);
        let mut model = Model::default();
        run(&mut table, &mut model, steps);
        prop_assert_eq!(seen(&table), (model.sessions, model.trees));
        prop_assert_eq!(table.check(), Ok(()));
        prop_assert!(table.places.len() <= MAX);
    }

    #[test]
    fn a_restored_table_goes_on_like_the_original(
        before in prop::collection::vec(step(), 0..40),
        after in prop::collection::vec(step(), 0..40),
    ) {
        let mut table = Trees::with_max(MAX);
        run(&mut table, &mut Model::default(), before);
        let (image, mut restored) = (table.freeze(), Trees::with_max(MAX));
        for piece in image.trees() {
            restored.restore_trees(&piece).expect("trees");
        }
        for piece in image.sessions() {
            restored.restore_sessions(&piece).expect("sessions");
        }
        prop_assert_eq!(restored.digest(), table.digest());
        run(&mut table, &mut Model::default(), after.clone());
        run(&mut restored, &mut Model::default(), after);
        prop_assert_eq!(restored.digest(), table.digest());
    }
}

#[test]
fn a_late_turn_does_not_count_for_the_session_in_its_place() {
    let mut table = Trees::with_max(MAX);
    table.begin(&new_session(1, None, 0), 0);
    let first = table.published();
    let first = first
        .session(AgentSessionKey(1))
        .expect("it has begun")
        .place(AgentSessionKey(1));
    assert!(table.end_named(SessionRef::Place(first)));
    table.begin(&new_session(2, None, 0), 0);
    let second = table.published();
    let second = second
        .session(AgentSessionKey(2))
        .expect("it has begun")
        .place(AgentSessionKey(2));
    assert_eq!(first.number(), second.number());
    let turn = |place| SessionTurn {
        session: SessionRef::Place(place),
        usage: usage(5),
    };
    assert!(!table.turn(&turn(first), 1));
    assert!(table.turn(&turn(second), 1));
}

#[test]
fn damaged_sections_of_sessions_are_refused() {
    let mut table = Trees::with_max(MAX);
    table.begin(&new_session(1, None, 0), 0);
    table.begin(&new_session(2, Some(1), 0), 0);
    let image = table.freeze();
    let sessions = image.sessions().next().expect("there are sessions");
    let trees = image.trees().next().expect("there is a tree");
    let mut twice = Trees::with_max(MAX);
    twice.restore_sessions(&sessions).expect("sessions");
    assert!(twice.restore_sessions(&sessions).is_err());
    assert!(twice.check_trees().is_err(), "the tree is missing");
    twice.restore_trees(&trees).expect("the tree");
    assert!(twice.restore_trees(&trees).is_err());
    assert_eq!(twice.check_trees(), Ok(()));
}

#[test]
fn a_turn_of_a_session_takes_few_bytes_in_the_log() {
    let turn = |place, input_cached| {
        Item::EndTurn(SessionTurn {
            session: SessionRef::Place(SessionPlace(place)),
            usage: TurnUsage {
                input_uncached: 700,
                input_cached,
                output: 444,
            },
        })
    };
    let (few, most) = (2000 << CHECK_BITS, (SESSIONS_MAX as u32) << CHECK_BITS);
    assert_eq!(item_bytes(&turn(few, 16_000)), 10);
    assert_eq!(item_bytes(&turn(most, 142_000)), 12);
    let begin = Item::BeginSession(NewSession {
        key: AgentSessionKey(1),
        parent: Some(AgentSessionKey(2)),
        user: UserKey(3),
        model: ModelKey(4),
        home: home(1),
    });
    assert_eq!(item_bytes(&begin), 36);
}
