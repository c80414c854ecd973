//! Random commands, valid and invalid, as replicas, operators and readers of KV events might
//! propose them.
//!
//! Used by the properties of the state and by the tests of the reference model in `chaos-tests`.

#![allow(dead_code, reason = "chaos-tests takes what it needs")]

use proptest::prelude::*;
use state::admission::{AdmissionSettings, Concurrency};
use state::budgets::Budget;
use state::caches::CacheScope;
use state::capacity::{DEMAND_REQUESTS_MAX, DemandReport, ModelDemand};
use state::command::{
    BackendSpec, Charge, Command, EngineFacts, Item, Lane, LeaseOutcome, UserDefaults, UserSettings,
};
use state::discovery::{Discovery, DiscoveryChange};
use state::ids::{
    AgentSessionKey, ApiKeyId, AttemptId, BackendRef, EngineHash, Incarnation, ModelKey, ReplicaId,
    SessionId, Slot, SourceKey, StreamCarrier, StreamId, UserKey,
};
use state::kv_events::{
    KvBatch, KvEvent, KvMessage, KvRejection, KvUncertainty, KvUpdate, LowerTier,
};
use state::policy::PolicyConfig;
use state::prefix::user_key;
use state::quotas::UserLimits;
use state::ratios::TextSample;
use state::service::ServiceSample;
use state::streams::{CarriedStream, StreamCharge};
use state::trees::{NewSession, SessionPlace, SessionRef, SessionTurn, TurnUsage};
use state::usage::{UsageSource, source_key};

use super::common::{self, block, chain, spec};

/// One log entry, or the rebuilding of a replica from a snapshot.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Apply {
        replica: u8,
        session: u64,
        lane: Lane,
        is_repeat: bool,
        command: Command,
    },
    Skip,
    Rebuild,
    /// Takes a backup of the state.
    Backup,
    /// Restores the last backup. Meanwhile one of the replicas is rebuilt, or reads ahead.
    Restore {
        is_rebuilt: bool,
    },
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0_u8..3, 0..6)
}

fn backend() -> impl Strategy<Value = BackendRef> {
    (0_u16..3, 1_u32..5).prop_map(|(slot, incarnation)| BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    })
}

fn user() -> impl Strategy<Value = (UserKey, String)> {
    (0_u8..5).prop_map(|number| {
        let name = format!("user-{number}");
        (user_key(common::HASH_SEED, &name), name)
    })
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![9 => 0_u64..1000, 1 => Just(u64::MAX)]
}

pub(crate) fn item() -> impl Strategy<Value = Item> {
    let attempt = || 0_u32..12;
    let acquire = (attempt(), backend(), path(), 0_usize..6).prop_map(
        |(attempt, backend, path, tip_length)| {
            let mut new = chain(&path);
            let tip_length = tip_length.min(new.len());
            let tip = tip_length.checked_sub(1).map(|place| new[place]);
            new.drain(..tip_length);
            Item::Acquire {
                attempt,
                backend,
                tip,
                new,
            }
        },
    );
    // Invalid chains: repeated and unrelated blocks.
    let forged = (attempt(), backend(), prop::collection::vec(path(), 0..5)).prop_map(
        |(attempt, backend, paths)| {
            let new = paths.iter().map(|path| block(path)).collect();
            Item::Acquire {
                attempt,
                backend,
                tip: None,
                new,
            }
        },
    );
    let materialize = (attempt(), path()).prop_map(|(attempt, path)| Item::Materialize {
        attempt,
        new: chain(&path),
    });
    let outcome = prop_oneof![
        Just(LeaseOutcome::Kept),
        Just(LeaseOutcome::KeptUntouched),
        Just(LeaseOutcome::Discarded),
    ];
    let release =
        (attempt(), outcome).prop_map(|(attempt, outcome)| Item::Release { attempt, outcome });
    let define = (user(), user())
        .prop_map(|((key, own), (_, other))| {
            [
                Item::DefineUser { key, name: own },
                Item::DefineUser { key, name: other },
            ]
        })
        .prop_flat_map(|names| (0_usize..2).prop_map(move |which| names[which].clone()));
    prop_oneof![
        8 => acquire, 1 => forged, 4 => materialize, 6 => release, 4 => charge(), 1 => define,
        1 => observe(), 1 => service(), 1 => outputs(), 1 => text(), 1 => block_size(), 6 => kv(),
        6 => session(), 4 => stream(), 1 => define_source(),
        1 => demand(),
    ]
}

/// Generates a report of demand, plausible or not.
fn demand() -> impl Strategy<Value = Item> {
    let requests = || prop_oneof![9 => 0_u32..50, 1 => Just(DEMAND_REQUESTS_MAX + 1)];
    let model = prop_oneof![9 => "m[0-2]", 1 => Just(String::new())];
    (model, requests(), requests(), count(), 0_u32..2).prop_map(
        |(model, waiting, running, waiting_tokens, started)| {
            let demand = ModelDemand {
                waiting,
                running,
                waiting_tokens,
            };
            Item::ObserveDemand(Box::new(DemandReport {
                model,
                demand,
                started,
            }))
        },
    )
}

/// Generates a charge of a resumable stream, which any request may carry or take over.
fn stream() -> impl Strategy<Value = Item> {
    let carried = (0_u64..4, 0_u64..3).prop_map(|(stream, carrier)| CarriedStream {
        stream: StreamId(stream),
        carrier: StreamCarrier(carrier),
    });
    let flags = (prop::option::of(0_u32..4), any::<bool>());
    let turn = prop::option::of((0_u64..8, count()));
    (carried, charge(), flags, turn).prop_filter_map(
        "a charge",
        |(carried, item, (takes_over, is_closed), turn)| {
            let Item::Charge(charge) = item else {
                return None;
            };
            let turn = turn.map(|(key, output)| SessionTurn {
                session: SessionRef::Key(AgentSessionKey(key)),
                usage: TurnUsage {
                    output,
                    ..TurnUsage::default()
                },
            });
            Some(Item::ChargeStream(Box::new(StreamCharge {
                carried,
                takes_over,
                is_closed,
                charge,
                turn,
            })))
        },
    )
}

/// Generates an item about a session of an agent. Its handle may name any session or none.
fn session() -> impl Strategy<Value = Item> {
    let key = || (0_u64..8).prop_map(AgentSessionKey);
    let handle = || {
        let place = (0_u32..40).prop_map(|place| SessionRef::Place(SessionPlace(place)));
        prop_oneof![3 => place, 1 => key().prop_map(SessionRef::Key)]
    };
    let begin = (key(), prop::option::of(key()), user(), backend()).prop_map(
        |(key, parent, (user, _), home)| {
            Item::BeginSession(NewSession {
                key,
                parent,
                user,
                model: ModelKey(1),
                home,
            })
        },
    );
    let turn = (handle(), count(), count(), count()).prop_map(
        |(session, input_uncached, input_cached, output)| {
            let usage = TurnUsage {
                input_uncached,
                input_cached,
                output,
            };
            Item::EndTurn(SessionTurn { session, usage })
        },
    );
    let relocate =
        (handle(), backend()).prop_map(|(session, home)| Item::MoveSession { session, home });
    prop_oneof![3 => begin, 3 => turn, 2 => relocate, 1 => handle().prop_map(Item::EndSession)]
}

/// Returns `event` of the GPU as one of a lower tier, by name only if `is_copied`.
fn on_tier(tier: LowerTier, is_copied: bool, event: KvEvent) -> KvEvent {
    match event {
        KvEvent::Stored { blocks, .. } if is_copied => KvEvent::TierCopied {
            tier,
            blocks: blocks.into_iter().map(|(engine, _)| engine).collect(),
        },
        KvEvent::Stored { parent, blocks } => KvEvent::TierStored {
            tier,
            parent,
            blocks,
        },
        KvEvent::Removed { blocks } => KvEvent::TierRemoved { tier, blocks },
        other => other,
    }
}

/// Generates any report of a reader, valid or not.
fn kv() -> impl Strategy<Value = Item> {
    let engine = |path: &[u8]| EngineHash(block(path).0 ^ 1);
    let stored = (prop::option::weighted(0.5, path()), path(), any::<bool>()).prop_map(
        move |(parent, path, is_honest)| {
            let before = parent.clone().unwrap_or_default();
            let whole: Vec<u8> = before.iter().chain(&path).copied().collect();
            let blocks = (before.len() + 1..=whole.len()).map(|end| {
                let engine = engine(&whole[..end]);
                let router = if is_honest { &whole[..end] } else { &path[..] };
                (engine, block(router))
            });
            KvEvent::Stored {
                parent: parent.map(|path| engine(&path)),
                blocks: blocks.collect(),
            }
        },
    );
    let removed = prop::collection::vec(path(), 0..4).prop_map(move |paths| KvEvent::Removed {
        blocks: paths.iter().map(|path| engine(path)).collect(),
    });
    let of_cache = (
        prop::option::weighted(0.4, (0_usize..3, any::<bool>())),
        prop_oneof![6 => stored, 4 => removed],
    )
        .prop_map(move |(below, event)| match below {
            Some((tier, copied)) => on_tier(LowerTier::ALL[tier], copied, event),
            None => event,
        });
    let left_out = path().prop_map(move |path| KvEvent::LeftOut {
        parent: engine(&path),
    });
    let event = prop_oneof![
        10 => of_cache,
        1 => left_out,
        1 => Just(KvEvent::Cleared),
    ];
    let flags = (prop::bool::weighted(0.9), prop::bool::weighted(0.1));
    let message = (
        0_u64..5,
        0_u16..2,
        flags,
        prop::collection::vec(event, 0..4),
    )
        .prop_map(|(seq, part, (is_last, is_after_loss), events)| {
            KvUpdate::Message(KvMessage {
                seq,
                mark: 3,
                part: if is_last { 0 } else { part },
                is_last,
                is_after_loss,
                events,
            })
        });
    let news = prop_oneof![
        2 => Just(KvUpdate::Begin),
        12 => message,
        6 => prop::option::of(0_u64..5).prop_map(|seq| KvUpdate::Current { seq }),
        1 => Just(KvUpdate::Doubt(KvUncertainty::Behind)),
        1 => Just(KvUpdate::Refuse(KvRejection::Models)),
    ];
    (backend(), 0_u16..2, 0_u64..3, news).prop_map(|(backend, rank, publisher, news)| {
        Item::KvEvents(KvBatch {
            backend,
            rank,
            publisher,
            news,
        })
    })
}

/// Returns one of four sources, the first of which stands for none.
fn source_number(number: u64) -> SourceKey {
    match number {
        0 => SourceKey::OTHER,
        _ => source_key(common::HASH_SEED, None, &format!("m{number}")),
    }
}

/// Generates the name of a source, with an API key or without.
fn define_source() -> impl Strategy<Value = Item> {
    let key = prop::option::of((0_u64..2).prop_map(ApiKeyId));
    (key, 0_u64..4).prop_map(|(key, number)| {
        let model = format!("m{number}");
        Item::DefineSource(UsageSource { key, model })
    })
}

fn charge() -> impl Strategy<Value = Item> {
    let few = || 0_u32..3;
    let requests = (few(), few(), few(), few());
    (
        user(),
        count(),
        count(),
        count(),
        requests,
        (count(), count(), 0_u64..4),
    )
        .prop_map(
            |(
                (user, _),
                input_uncached,
                input_cached,
                output,
                requests,
                (advance, settled, source),
            )| {
                let (started, ended, queued, dequeued) = requests;
                Item::Charge(Charge {
                    user,
                    source: source_number(source),
                    input_uncached,
                    input_cached,
                    output,
                    started,
                    ended,
                    queued,
                    dequeued,
                    advance,
                    settled,
                })
            },
        )
}

fn observe() -> impl Strategy<Value = Item> {
    (
        backend(),
        prop::option::of(0_u32..12),
        prop::option::of(1_u64..5),
        any::<Option<bool>>(),
    )
        .prop_map(
            |(backend, capacity_blocks, started_at_s, drops_last_block)| {
                let facts = EngineFacts {
                    models: None,
                    capacity_blocks,
                    started_at_s,
                    drops_last_block,
                };
                Item::ObserveEngine { backend, facts }
            },
        )
}

fn outputs() -> impl Strategy<Value = Item> {
    (user(), 0_u64..3, prop::collection::vec(0_u32..2000, 0..90)).prop_map(
        |((user, _), model, tokens)| Item::ObserveOutputs {
            user,
            model: ModelKey(model),
            tokens,
        },
    )
}

fn block_size() -> impl Strategy<Value = Item> {
    let tokens = prop_oneof![
        9 => prop::sample::select(vec![16, 24, 32, 64]),
        1 => any::<u32>(),
    ];
    (backend(), tokens).prop_map(|(backend, tokens)| Item::ObserveBlockSize { backend, tokens })
}

fn text() -> impl Strategy<Value = Item> {
    let bytes = prop_oneof![9 => 0_u64..100_000, 1 => any::<u64>()];
    (0_u64..3, bytes, 0_u64..30_000).prop_map(|(model, bytes, tokens)| {
        Item::ObserveText(TextSample {
            model: ModelKey(model),
            bytes,
            tokens,
        })
    })
}

fn service() -> impl Strategy<Value = Item> {
    let requests = prop::collection::vec(0_u64..5000, 0..40);
    let few = || prop_oneof![9 => 0_u64..500, 1 => any::<u64>()];
    (backend(), requests, 0_u32..40, few(), few(), few()).prop_map(
        |(backend, requests, block_tokens, gaps, gap_us, gaps_at_limit)| {
            Item::ObserveService(Box::new(ServiceSample {
                ended: requests.len() as u32,
                added_tokens: requests.iter().sum(),
                added_squared: requests.iter().map(|tokens| tokens * tokens).sum(),
                block_tokens,
                gaps,
                gap_us: gap_us.saturating_mul(10_000),
                gap_running: gaps.saturating_mul(30),
                gaps_at_limit,
                ..ServiceSample::empty(backend)
            }))
        },
    )
}

fn user_limits() -> impl Strategy<Value = UserLimits> {
    let of = |most: u32| prop::option::of(0..most);
    let of_tree = (of(3), of(900));
    (of(5), of(900), of(4), of_tree, of(100_000)).prop_map(
        |(requests, tokens, concurrent, (concurrent_per_tree, tokens_per_tree), window_ms)| {
            UserLimits {
                requests,
                tokens: tokens.map(u64::from),
                concurrent,
                concurrent_per_tree,
                tokens_per_tree: tokens_per_tree.map(u64::from),
                window_ms,
            }
        },
    )
}

fn admission() -> impl Strategy<Value = AdmissionSettings> {
    let concurrency = prop_oneof![
        3 => Just(Concurrency::Adaptive),
        1 => Just(Concurrency::Unlimited),
        1 => (0_u32..3).prop_map(Concurrency::Fixed),
    ];
    (concurrency, 0_u16..6, 0_u32..80_000).prop_map(|(concurrency, bins, inter_token_us)| {
        AdmissionSettings {
            concurrency,
            bins,
            inter_token_us,
            ..AdmissionSettings::default()
        }
    })
}

/// Budgets that some charges use up.
fn budget() -> impl Strategy<Value = Budget> {
    let of = || prop::option::of(0_u64..3000);
    (of(), of()).prop_map(|(day, month)| Budget { day, month })
}

fn scope() -> impl Strategy<Value = CacheScope> {
    let group = |name: &str| CacheScope::Group(name.to_owned());
    let scopes = [
        CacheScope::Shared,
        CacheScope::Own,
        group("team"),
        group(""),
    ];
    prop::sample::select(scopes.to_vec())
}

fn user_settings() -> impl Strategy<Value = Command> {
    let models = prop::sample::select(vec![vec![], vec!["m*".to_owned()]]);
    (
        user(),
        prop::option::of(0_u32..3000),
        prop::option::of(user_limits()),
        prop::option::of(budget()),
        models,
        prop::option::of(scope()),
    )
        .prop_map(|((_, name), weight_milli, limits, budget, models, cache)| {
            let settings = UserSettings {
                weight_milli,
                limits,
                budget,
                models,
                cache,
            };
            Command::ConfigureUser {
                name,
                settings: Box::new(settings),
            }
        })
}

fn user_defaults() -> impl Strategy<Value = Command> {
    (0_u32..3000, user_limits(), budget(), scope()).prop_map(
        |(weight_milli, limits, budget, cache)| {
            Command::PutUserDefaults(Box::new(UserDefaults {
                weight_milli,
                limits,
                budget,
                cache,
            }))
        },
    )
}

fn discover() -> impl Strategy<Value = Command> {
    let name = || (0_u8..4).prop_map(|backend| backend.to_string());
    let found = (0_u8..4, 1_u16..3)
        .prop_map(|(backend, port)| DiscoveryChange::Found(spec(&backend.to_string(), port, None)));
    let change = prop_oneof![
        3 => found,
        2 => name().prop_map(|name| DiscoveryChange::Lost { name }),
        1 => name().prop_map(|name| DiscoveryChange::Forgotten { name }),
    ];
    let source = prop_oneof![8 => Just("dns"), 2 => Just("pods"), 1 => Just("")];
    (source, change).prop_map(|(source, change)| {
        let source = source.to_owned();
        Command::Discover(Box::new(Discovery { source, change }))
    })
}

pub(crate) fn command() -> impl Strategy<Value = Command> {
    let batch =
        (0_u64..4, prop::collection::vec(item(), 0..8)).prop_map(|(base, items)| Command::Batch {
            base_attempt: AttemptId(base),
            items,
        });
    let put = (0_u8..4, 1_u16..3, prop::option::of(0_u32..12)).prop_map(
        |(backend, port, capacity)| -> BackendSpec { spec(&backend.to_string(), port, capacity) },
    );
    let name = || (0_u8..4).prop_map(|backend| backend.to_string());
    let expire = (1_u8..4, 1_u64..4).prop_map(|(replica, session)| Command::ExpireSession {
        replica: ReplicaId(replica),
        session: SessionId(session),
    });
    prop_oneof![
        30 => batch,
        4 => put.prop_map(Command::PutBackend),
        1 => name().prop_map(|name| Command::DeleteBackend { name }),
        1 => (name(), any::<bool>(), any::<bool>())
            .prop_map(|(name, draining, moves_streams)| Command::SetDraining { name, draining, moves_streams }),
        1 => Just(Command::PutPolicy(PolicyConfig::LeastRequest)),
        4 => user_settings(),
        1 => user_defaults(),
        1 => user().prop_map(|(_, name)| Command::ForgiveUser { name }),
        1 => user().prop_map(|(_, name)| Command::DeleteUser { name }),
        1 => (0_u64..8).prop_map(|key| Command::EndTree { root: AgentSessionKey(key) }),
        1 => (backend(), 0_u16..5)
            .prop_map(|(backend, ranks)| Command::SetRanks { backend, ranks }),
        1 => expire,
        1 => admission().prop_map(Command::PutAdmission),
        1 => Just(common::init()),
        4 => discover(),
    ]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let lane = prop_oneof![Just(Lane::Outbox), Just(Lane::Admin)];
    let session = prop_oneof![20 => Just(1_u64), 1 => 1_u64..4];
    let apply = (1_u8..4, session, lane, prop::bool::weighted(0.1), command()).prop_map(
        |(replica, session, lane, is_repeat, command)| Step::Apply {
            replica,
            session,
            lane,
            is_repeat,
            command,
        },
    );
    prop_oneof![
        30 => apply,
        1 => Just(Step::Skip),
        1 => Just(Step::Rebuild),
        1 => Just(Step::Backup),
        1 => any::<bool>().prop_map(|is_rebuilt| Step::Restore { is_rebuilt }),
    ]
}
