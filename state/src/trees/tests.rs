//! Tests of the table of sessions against a model, of its image, and of its items' size.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::table::{Ending, TreesBounds};
use super::*;
use crate::codec::item_bytes;
use crate::command::Item;
use crate::ids::{Incarnation, Slot};

const BOUNDS: TreesBounds = TreesBounds {
    sessions: 6,
    share: 3,
    ends: 2,
};
/// Number of users.
const USERS: u64 = 3;
const STEP_MS: u64 = SESSION_IDLE_MS / 8;
const MINUTE_MS: u64 = 60_000;

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
        user: UserKey(key % USERS),
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
        1 => (0..USERS).prop_map(Step::ForgetUser),
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
    endings: BTreeSet<Ending>,
}

impl Model {
    fn begin(&mut self, key: u64, parent: Option<u64>, slot: u16, now_ms: u64) {
        if self.sessions.contains_key(&key) {
            return self.touch(key, now_ms, |it| it.home = home(slot));
        }
        // The parent may be the one that makes room.
        let parent = parent.filter(|it| *it != key);
        let root = parent.map_or(key, |it| self.sessions.get(&it).map_or(it, |it| it.root));
        let before = self.trees.get(&root).copied();
        if self.sessions.len() == BOUNDS.sessions {
            self.make_room();
        }
        // A tree whose only session has made room goes on.
        self.trees.entry(root).or_insert(before.unwrap_or_default());
        let session = ModelSession {
            root,
            user: key % USERS,
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

    fn make_room(&mut self) {
        let held = |user: u64| self.sessions.values().filter(|it| it.user == user).count();
        let most = (0..USERS).max_by_key(|user| (held(*user), *user));
        let greatest = most.filter(|user| held(*user) >= BOUNDS.share);
        let sessions = self.sessions.iter();
        let idlest = sessions
            .filter(|(_, it)| greatest.is_none_or(|user| it.user == user))
            .min_by_key(|(key, it)| (it.used_ms / MINUTE_MS, **key));
        let idlest = *idlest.expect("a full table has sessions").0;
        self.end(idlest);
    }

    fn end_some(&mut self, ending: Ending, most: usize) {
        let place = |(key, it): (&u64, &ModelSession)| match ending {
            Ending::Tree(root) => (it.root == root.0).then_some((0, *key)),
            Ending::User(user) => (it.user == user.0).then_some((it.used_ms / MINUTE_MS, *key)),
        };
        let members: BTreeSet<(u64, u64)> = self.sessions.iter().filter_map(place).collect();
        for (_, key) in members.iter().take(most) {
            self.end(*key);
        }
        match members.len() > most {
            true => self.endings.insert(ending),
            false => self.endings.remove(&ending),
        };
    }

    fn forget_some(&mut self, now_ms: u64) {
        let endings: Vec<Ending> = self.endings.iter().copied().take(BOUNDS.ends).collect();
        for ending in &endings {
            self.end_some(*ending, BOUNDS.ends / endings.len());
        }
        let minutes = |it: &ModelSession| it.used_ms / MINUTE_MS + 1;
        let is_idle = |it: &ModelSession| minutes(it) * MINUTE_MS + SESSION_IDLE_MS <= now_ms;
        let sessions = self.sessions.iter();
        let idle: Vec<u64> = sessions
            .filter(|(_, it)| is_idle(it))
            .map(|(key, _)| *key)
            .collect();
        idle.into_iter().for_each(|key| self.end(key));
    }
}

fn run(table: &mut Trees, model: &mut Model, steps: Vec<Step>) {
    let mut now_ms = 1_000_000;
    for step in steps {
        table.forget_some(now_ms);
        model.forget_some(now_ms);
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
                session.map(|session| table.turn(&SessionTurn { session, usage }, None, now_ms));
                model.turn(key, &usage, now_ms);
            }
            Step::End(key) => {
                name(key).map(|it| table.end_named(it));
                model.end(key);
            }
            Step::EndTree(root) => {
                if table.end_tree(AgentSessionKey(root)) {
                    model.trees.insert(root, <_>::default());
                    model.end_some(Ending::Tree(AgentSessionKey(root)), BOUNDS.ends);
                }
            }
            Step::ForgetUser(user) => {
                table.forget_user(UserKey(user));
                model.end_some(Ending::User(UserKey(user)), BOUNDS.ends);
            }
            Step::Pass(steps) => now_ms += steps * STEP_MS + 1,
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
        let mut table = Trees::with_bounds(BOUNDS);
        let mut model = Model::default();
        run(&mut table, &mut model, steps);
        prop_assert_eq!(seen(&table), (model.sessions, model.trees));
        prop_assert_eq!(&table.endings, &model.endings);
        prop_assert_eq!(table.check(), Ok(()));
        prop_assert!(table.places.len() <= BOUNDS.sessions);
    }

    #[test]
    fn a_restored_table_goes_on_like_the_original(
        before in prop::collection::vec(step(), 0..40),
        after in prop::collection::vec(step(), 0..40),
    ) {
        let mut table = Trees::with_bounds(BOUNDS);
        run(&mut table, &mut Model::default(), before);
        let (image, mut restored) = (table.freeze(), Trees::with_bounds(BOUNDS));
        for piece in image.trees() {
            restored.restore_trees(&piece).expect("trees");
        }
        for piece in image.sessions() {
            restored.restore_sessions(&piece).expect("sessions");
        }
        if let Some(endings) = image.endings() {
            restored.restore_endings(&endings).expect("endings");
        }
        prop_assert_eq!(restored.digest(), table.digest());
        run(&mut table, &mut Model::default(), after.clone());
        run(&mut restored, &mut Model::default(), after);
        prop_assert_eq!(restored.digest(), table.digest());
    }
}

/// Begins sessions with these keys, each of a user and a tree of its own, unless they are given.
fn begin_all(
    table: &mut Trees,
    keys: std::ops::Range<u64>,
    (user, parent): (Option<u64>, Option<u64>),
    now_ms: u64,
) {
    for key in keys {
        let session = NewSession {
            user: UserKey(user.unwrap_or(key)),
            ..new_session(key, parent, 0)
        };
        table.begin(&session, now_ms);
    }
}

#[test]
fn a_user_with_endless_names_ends_no_session_of_others() {
    let mut table = Trees::with_bounds(TreesBounds {
        sessions: 100,
        share: 10,
        ends: 2,
    });
    // Those of others are idle for longest.
    begin_all(&mut table, 0..60, (None, None), MINUTE_MS);
    begin_all(&mut table, 1000..1500, (Some(999), None), 2 * MINUTE_MS);
    let others = |table: &Trees| {
        let view = table.published();
        let owned = |(_, it): &(AgentSessionKey, &AgentSession)| it.user != UserKey(999);
        view.sessions().filter(owned).count()
    };
    assert_eq!((others(&table), table.sessions.len()), (60, 100));
    // The user makes room for others, until it holds less than a share.
    begin_all(&mut table, 100..131, (None, None), 3 * MINUTE_MS);
    assert_eq!((others(&table), table.sessions.len()), (91, 100));
    // Then the idlest session makes room, whoever owns it.
    begin_all(&mut table, 200..205, (None, None), 4 * MINUTE_MS);
    assert_eq!((others(&table), table.sessions.len()), (91, 100));
    assert!(table.sessions.get(&AgentSessionKey(4)).is_none());
}

#[test]
fn a_great_tree_ends_over_several_commands_and_its_figures_at_once() {
    let mut table = Trees::with_bounds(TreesBounds {
        sessions: 100,
        ..BOUNDS
    });
    begin_all(&mut table, 1..8, (Some(1), Some(0)), 1);
    let turn = SessionTurn {
        session: SessionRef::Key(AgentSessionKey(7)),
        usage: usage(5),
    };
    table.turn(&turn, None, 2);
    assert!(table.end_tree(AgentSessionKey(0)));
    let tree = table.trees.get(&AgentSessionKey(0)).expect("it has more");
    let figures = (tree.sessions, tree.turns, tree.usage);
    assert_eq!(figures, (5, 0, TurnUsage::default()));
    for left in [3, 1, 0] {
        table.forget_some(2);
        assert_eq!(table.sessions.len(), left);
    }
    assert!(table.endings.is_empty());
    assert!(!table.end_tree(AgentSessionKey(0)));
}

#[test]
fn a_tree_ends_beside_a_greater_one() {
    let mut table = Trees::with_bounds(TreesBounds {
        sessions: 100,
        ..BOUNDS
    });
    begin_all(&mut table, 1..41, (Some(1), Some(0)), 1);
    begin_all(&mut table, 51..55, (Some(1), Some(50)), 1);
    for root in [0, 50] {
        assert!(table.end_tree(AgentSessionKey(root)));
    }
    let left = |table: &Trees, root| {
        let tree = table.trees.get(&AgentSessionKey(root));
        tree.map_or(0, |it| it.sessions)
    };
    for expected in [(37, 1), (36, 0), (34, 0)] {
        table.forget_some(2);
        assert_eq!((left(&table, 0), left(&table, 50)), expected);
    }
}

#[test]
fn a_late_turn_does_not_count_for_the_session_in_its_place() {
    let mut table = Trees::with_bounds(BOUNDS);
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
    assert!(!table.turn(&turn(first), None, 1));
    assert!(table.turn(&turn(second), None, 1));
}

#[test]
fn damaged_sections_of_sessions_are_refused() {
    let mut table = Trees::with_bounds(BOUNDS);
    table.begin(&new_session(1, None, 0), 0);
    table.begin(&new_session(2, Some(1), 0), 0);
    let image = table.freeze();
    let sessions = image.sessions().next().expect("there are sessions");
    let trees = image.trees().next().expect("there is a tree");
    let mut twice = Trees::with_bounds(BOUNDS);
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
