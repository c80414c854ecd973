//! The effects of commands, as scripts with golden replies.

use crate::common::{self, Driver, chain, envelope, init, spec};
use expect_test::{Expect, expect};
use state::RouterState;
use state::command::{Charge, Command, EngineFacts, Item, Lane, LeaseOutcome, Reply, UserSettings};
use state::ids::{BackendRef, BlockHash, Incarnation, LogIndex, ReplicaId, SessionId, Slot};
use state::policy::PolicyConfig;
use state::prefix::user_key;

/// Runs a script of one command per line, `replica[.session] verb arguments`, and compares the
/// replies and the resulting state. A path of blocks is written as digits.
#[track_caller]
fn check(script: &str, golden: &Expect) {
    let mut driver = Driver::new();
    let mut out = String::new();
    for line in script
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (replica, session) = words[0].split_once('.').unwrap_or((words[0], "1"));
        let command = command(&driver.state, &words[1..]);
        let (replica, session) = (replica.parse().unwrap(), session.parse().unwrap());
        let reply = match driver.apply_in(replica, session, command) {
            Reply::Applied => "ok".to_owned(),
            Reply::Batch(batch) => {
                let missing: Vec<u64> = batch.missing_tip.iter().map(|it| it.0).collect();
                match (missing.as_slice(), batch.dropped) {
                    ([], 0) => "ok".to_owned(),
                    ([], dropped) => format!("dropped {dropped}"),
                    (missing, dropped) => format!("dropped {dropped}, missing tip {missing:?}"),
                }
            }
            Reply::Rejected(reject) => format!("refused: {reject}"),
            Reply::Repeated(_) => unreachable!("the driver repeats nothing"),
        };
        out += &format!("{line:<32} {reply}\n");
        assert_eq!(driver.state.check(), Ok(()), "after {line}");
    }
    golden.assert_eq(&(out + &summary(&driver.state)));
}

fn command(state: &RouterState, words: &[&str]) -> Command {
    let name = |place: usize| words[place].to_owned();
    match words[0] {
        "put" => {
            let capacity = words.get(3).map(|capacity| capacity.parse().unwrap());
            Command::PutBackend(spec(words[1], words[2].parse().unwrap(), capacity))
        }
        "delete" => Command::DeleteBackend { name: name(1) },
        "drain" | "undrain" => {
            let draining = words[0] == "drain";
            Command::SetDraining {
                name: name(1),
                draining,
                moves_streams: false,
            }
        }
        "weight" => Command::configure_user(name(1), UserSettings::of_weight(number(words[2]))),
        "policy" => Command::PutPolicy(PolicyConfig::LeastRequest),
        "expire" => {
            let (replica, session) = (ReplicaId(words[1].parse().unwrap()), number(words[2]));
            Command::ExpireSession {
                replica,
                session: SessionId(u64::from(session)),
            }
        }
        _ => common::batch(vec![item(state, words)]),
    }
}

fn item(state: &RouterState, words: &[&str]) -> Item {
    let key = user_key(common::HASH_SEED, words[1]);
    match words[0] {
        // acquire ATTEMPT BACKEND WHOLE-PATH [TIP-LENGTH]
        "acquire" => {
            let mut new = path(words[3]);
            let tip_length = words.get(4).map_or(0, |length| number(length) as usize);
            let tip = tip_length.checked_sub(1).map(|place| new[place]);
            new.drain(..tip_length);
            Item::Acquire {
                attempt: number(words[1]),
                backend: backend(state, words[2]),
                tip,
                new,
            }
        }
        // grow ATTEMPT WHOLE-PATH LENGTH-BEFORE
        "grow" => {
            let new = path(words[2]).split_off(number(words[3]) as usize);
            Item::Materialize {
                attempt: number(words[1]),
                new,
            }
        }
        "release" => Item::Release {
            attempt: number(words[1]),
            outcome: LeaseOutcome::Kept,
        },
        "discard" => Item::Release {
            attempt: number(words[1]),
            outcome: LeaseOutcome::Discarded,
        },
        // charge USER INPUT OUTPUT STARTED ENDED
        "charge" => Item::Charge(Charge {
            user: key,
            input_uncached: u64::from(number(words[2])),
            input_cached: 0,
            output: u64::from(number(words[3])),
            started: number(words[4]),
            ended: number(words[5]),
            ..Charge::default()
        }),
        "name" => Item::DefineUser {
            key,
            name: words[2].to_owned(),
        },
        // started BACKEND SECOND [CAPACITY]
        "started" => {
            let started_at_s = Some(u64::from(number(words[2])));
            let capacity_blocks = words.get(3).map(|capacity| number(capacity));
            let facts = EngineFacts {
                models: None,
                capacity_blocks,
                started_at_s,
                ..EngineFacts::default()
            };
            Item::ObserveEngine {
                backend: backend(state, words[1]),
                facts,
            }
        }
        other => panic!("no verb {other:?}"),
    }
}

fn number(word: &str) -> u32 {
    word.parse().unwrap()
}

fn path(digits: &str) -> Vec<BlockHash> {
    chain(
        &digits
            .bytes()
            .map(|digit| digit - b'0')
            .collect::<Vec<u8>>(),
    )
}

fn backend(state: &RouterState, name: &str) -> BackendRef {
    let nowhere = BackendRef {
        slot: Slot(9),
        incarnation: Incarnation(9),
    };
    state
        .backend(name)
        .map_or(nowhere, |backend| backend.handle)
}

fn summary(state: &RouterState) -> String {
    let mut out = String::new();
    for backend in state.backends() {
        let BackendRef { slot, incarnation } = backend.handle;
        let owned = state.owned_blocks(slot);
        let drains = if backend.draining { ", drains" } else { "" };
        out += &format!(
            "{} in {slot}, life {incarnation}, owns {owned}{drains}\n",
            backend.spec.id
        );
    }
    for session in state.sessions() {
        let (replica, leases) = (session.replica, session.open_leases);
        out += &format!(
            "replica {replica} in run {}, {leases} leases\n",
            session.session
        );
    }
    let mut users = state.users(None, 100);
    users.sort_by_key(|user| user.name.clone());
    for user in users {
        let (name, counter, in_flight) = (user.name, user.counter_milli_tokens, user.in_flight);
        out += &format!("user {name:?} at {counter}, {in_flight} in flight\n");
    }
    out
}

#[test]
fn prefixes_are_leased_extended_released_and_evicted() {
    check(
        "1 put a 1 4
         1 acquire 1 a 123
         1 acquire 2 a 1245 2
         1 release 1
         1 release 2
         1 acquire 3 a 12456 4
         1 acquire 4 a 123 3
         1 grow 3 124567 5
         1 discard 3
         1 release 3",
        &expect![[r#"
            1 put a 1 4                      ok
            1 acquire 1 a 123                ok
            1 acquire 2 a 1245 2             ok
            1 release 1                      ok
            1 release 2                      ok
            1 acquire 3 a 12456 4            ok
            1 acquire 4 a 123 3              dropped 0, missing tip [4]
            1 grow 3 124567 5                ok
            1 discard 3                      ok
            1 release 3                      dropped 1
            a in 0, life 1, owns 4
            replica 1 in run 1, 0 leases
        "#]],
    );
}

#[test]
fn late_and_unknown_items_are_dropped() {
    check(
        "1 put a 1
         1 acquire 1 a 12
         1 acquire 1 a 13
         1 release 2
         1 grow 2 1 0
         1 acquire 5 nobody 1
         2 release 1
         1 started a 100
         1 started a 99
         1 started a 200 50
         1 release 1
         1 put a 2
         1 started a 5",
        &expect![[r#"
            1 put a 1                        ok
            1 acquire 1 a 12                 ok
            1 acquire 1 a 13                 dropped 1
            1 release 2                      dropped 1
            1 grow 2 1 0                     dropped 1
            1 acquire 5 nobody 1             dropped 1
            2 release 1                      dropped 1
            1 started a 100                  ok
            1 started a 99                   ok
            1 started a 200 50               ok
            1 release 1                      dropped 1
            1 put a 2                        ok
            1 started a 5                    ok
            a in 0, life 3, owns 0
            replica 1 in run 1, 0 leases
            replica 2 in run 1, 0 leases
        "#]],
    );
}

#[test]
fn deleting_a_backend_ends_its_leases() {
    check(
        "1 put a 1
         1 put b 2
         1 acquire 1 a 12
         1 acquire 2 b 12
         1 delete a
         1 delete a
         1 release 1
         1 drain b
         1 drain c
         1 put c 3
         1 acquire 3 c 7",
        &expect![[r#"
            1 put a 1                        ok
            1 put b 2                        ok
            1 acquire 1 a 12                 ok
            1 acquire 2 b 12                 ok
            1 delete a                       ok
            1 delete a                       refused: no backend has the id "a"
            1 release 1                      dropped 1
            1 drain b                        ok
            1 drain c                        refused: no backend has the id "c"
            1 put c 3                        ok
            1 acquire 3 c 7                  ok
            c in 0, life 2, owns 1
            b in 1, life 1, owns 2, drains
            replica 1 in run 1, 2 leases
        "#]],
    );
}

#[test]
fn a_new_session_closes_the_previous_one() {
    check(
        "1 put a 1
         1 acquire 1 a 12
         1 charge alice 10 0 1 0
         2 acquire 1 a 34
         2 charge alice 10 0 1 0
         1.2 acquire 1 a 12 2
         1.1 release 1
         1 expire 2 7
         1.2 expire 2 7
         1.2 expire 2 1
         2 acquire 2 a 34 2",
        &expect![[r#"
            1 put a 1                        ok
            1 acquire 1 a 12                 ok
            1 charge alice 10 0 1 0          ok
            2 acquire 1 a 34                 ok
            2 charge alice 10 0 1 0          ok
            1.2 acquire 1 a 12 2             ok
            1.1 release 1                    refused: the session of replica 1 has ended
            1 expire 2 7                     refused: the session of replica 1 has ended
            1.2 expire 2 7                   ok
            1.2 expire 2 1                   ok
            2 acquire 2 a 34 2               ok
            a in 0, life 1, owns 4
            replica 1 in run 2, 1 leases
            replica 2 in run 1, 1 leases
            user "" at 20000, 0 in flight
        "#]],
    );
}

#[test]
fn users_are_named_weighted_and_charged() {
    check(
        "1 charge alice 100 10 1 0
         1 name alice alice
         1 name alice bob
         1 weight bob 2000
         1 charge bob 100 10 1 0
         1 weight bob 0
         1 charge alice 0 5 0 1",
        &expect![[r#"
            1 charge alice 100 10 1 0        ok
            1 name alice alice               ok
            1 name alice bob                 dropped 1
            1 weight bob 2000                ok
            1 charge bob 100 10 1 0          ok
            1 weight bob 0                   refused: weight_milli: at least 1
            1 charge alice 0 5 0 1           ok
            replica 1 in run 1, 0 leases
            user "alice" at 130000, 0 in flight
            user "bob" at 180000, 1 in flight
        "#]],
    );
}

#[test]
fn the_audit_lists_effective_commands() {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    driver.apply(2, Command::PutBackend(spec("a b", 1, None)));
    driver.apply(2, Command::PutPolicy(PolicyConfig::LeastRequest));
    driver.apply(
        2,
        Command::DeleteBackend {
            name: "a".to_owned(),
        },
    );
    let entry = |entry: &state::AuditEntry| {
        format!(
            "{} by {}: {:?} {}",
            entry.index, entry.replica, entry.action, entry.subject
        )
    };
    let audit: Vec<String> = driver.state.audit().map(entry).collect();
    expect![[r#"
        5 by 2: DeleteBackend a
        4 by 2: PutPolicy least-request
        2 by 1: PutBackend a
        1 by 1: FoundCluster cost"#]]
    .assert_eq(&audit.join("\n"));
    for _ in 0..300 {
        driver.apply(1, Command::PutPolicy(PolicyConfig::LeastRequest));
    }
    assert_eq!(driver.state.audit().count(), state::AUDIT_ENTRIES_MAX);
}

#[test]
fn every_rejection_names_its_cause() {
    let mut state = RouterState::new();
    let mut apply = |replica, session, seq, command| {
        let index = LogIndex(state.applied().0 + 1);
        state.apply(index, envelope(replica, session, Lane::Admin, seq, command))
    };
    let unknown = "x".repeat(1000);
    let replies = [
        apply(
            1,
            1,
            1,
            Command::DeleteBackend {
                name: "a".to_owned(),
            },
        ),
        apply(1, 1, 2, init()),
        apply(1, 1, 3, init()),
        apply(1, 1, 0, init()),
        apply(1, 2, 1, Command::PutPolicy(PolicyConfig::LeastRequest)),
        apply(1, 1, 4, Command::PutPolicy(PolicyConfig::LeastRequest)),
        apply(1, 2, 1, Command::PutPolicy(PolicyConfig::LeastRequest)),
        apply(1, 2, 2, Command::DeleteBackend { name: unknown }),
        apply(1, 2, 3, Command::PutBackend(spec("a/b", 1, None))),
    ];
    let told = replies.map(|reply| {
        let mut told = format!("{reply:?}");
        told.truncate(100);
        told
    });
    expect![[r#"
        Rejected(NotInitialised)
        Applied
        Rejected(AlreadyInitialised)
        Rejected(Invalid { field: "origin.seq", expected: "at least 1" })
        Applied
        Rejected(StaleSession { replica: ReplicaId(1) })
        Repeated(Applied)
        Rejected(UnknownBackend { name: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
        Rejected(Invalid { field: "id", expected: "1 to 256 characters of [A-Za-z0-9._-]" })"#]].assert_eq(&told.join("\n"));
    assert_eq!(state.check(), Ok(()));
}

#[test]
fn a_clock_far_ahead_moves_time_once_confirmed() {
    let mut state = RouterState::new();
    let mut apply = |session, seq, proposed_at_ms| {
        let index = LogIndex(state.applied().0 + 1);
        let command = Command::PutPolicy(PolicyConfig::LeastRequest);
        let mut envelope = envelope(1, session, Lane::Admin, seq, command);
        envelope.proposed_at_ms = proposed_at_ms;
        state.apply(index, envelope);
        (state.now_ms(), state.digest())
    };
    let day = 24 * 60 * 60 * 1000;
    let start = 20_000 * day;
    let times = [
        apply(1, 1, start).0,
        apply(1, 2, start - 1).0,
        apply(1, 3, u64::MAX).0,
        apply(1, 4, start + day).0,
        apply(2, 5, start + day + state::UNANIMOUS_MS).0,
    ];
    let expected = [0, 0, 0, 0, day + state::UNANIMOUS_MS].map(|passed| start + passed);
    assert_eq!(times, expected);
    // A command that is not applied does not advance time: a repeat, one from an ended session,
    // number 0.
    let last = apply(2, 5, start + day + state::UNANIMOUS_MS);
    assert_eq!(last.0, expected[4]);
    for (session, seq) in [(2, 5), (1, 9), (2, 0)] {
        assert_eq!(apply(session, seq, u64::MAX), last);
    }
}

#[test]
fn a_late_first_command_does_not_replace_a_session() {
    let mut driver = Driver::new();
    driver.apply_in(1, 7, Command::PutBackend(spec("a", 1, None)));
    let acquire = Item::Acquire {
        attempt: 1,
        backend: driver.state.backend("a").unwrap().handle,
        tip: None,
        new: chain(&[1, 2]),
    };
    driver.apply_in(1, 7, common::batch(vec![acquire]));
    let digest = driver.state.digest();
    // Stamped one second before the session's first command.
    let mut late = envelope(1, 6, Lane::Outbox, 1, common::batch(Vec::new()));
    late.proposed_at_ms = 1000;
    let reply = driver.state.apply(LogIndex(100), late);
    let replica = ReplicaId(1);
    assert_eq!(
        reply,
        Reply::Rejected(state::command::Rejection::StaleSession { replica })
    );
    assert_eq!(
        (driver.state.open_leases(), driver.state.digest()),
        (1, digest)
    );
}

#[test]
fn a_full_registry_refuses_another_backend() {
    let mut driver = Driver::new();
    for number in 0..state::command::BACKENDS_MAX {
        let id = number.to_string();
        assert_eq!(
            driver.apply(1, Command::PutBackend(spec(&id, 1, None))),
            Reply::Applied
        );
    }
    let reply = driver.apply(1, Command::PutBackend(spec("one-more", 1, None)));
    assert_eq!(
        reply,
        Reply::Rejected(state::command::Rejection::TooManyBackends)
    );
}

#[test]
fn readers_see_a_command_once_its_index_is_applied() {
    let mut driver = Driver::new();
    let view = driver.state.view();
    assert!(view.registry().initialised);
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    let handle = view.registry().backends[0].handle;
    let new = chain(&[1, 2, 3]);
    let acquire = Item::Acquire {
        attempt: 1,
        backend: handle,
        tip: None,
        new: new.clone(),
    };
    driver.apply(1, common::batch(vec![acquire]));
    assert_eq!(view.applied(), driver.state.applied());
    let mut matched = Vec::new();
    view.blocks
        .match_prefix(&new, |slot, blocks| matched.push((slot, blocks)));
    assert_eq!(matched, [(handle.slot, 3)]);
    driver.state.skip(LogIndex(1000));
    assert_eq!(view.applied(), LogIndex(1000));
}

#[test]
#[should_panic(expected = "log applied out of order: 1 after 1")]
fn the_log_is_applied_in_order() {
    let mut state = RouterState::new();
    state.skip(LogIndex(1));
    state.skip(LogIndex(1));
}
