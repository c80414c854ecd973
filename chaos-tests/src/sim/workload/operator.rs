//! Operators, who change replicated settings: backends, policies, admission, users.

use api::ports::ProposeError;
use lab::rng::Rng;
use state::admission::{
    AdmissionSettings, Batching, BinSelection, ChargeInput, Concurrency, Order,
};
use state::budgets::Budget;
use state::command::{Command, Committed, Reply, UserSettings};
use state::ids::{ApiKeyId, ReplicaId};
use state::keys::{ApiKeySpec, SecretHash};
use state::policy::{PolicyConfig, RoutingSettings};
use state::quotas::UserLimits;

use super::{API_KEYS, BACKENDS, ReplicaHandles, backend, first_backends, think, user};
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::observation::ReplicaRun;

/// Label of an operator's draws, which separates them from those of other kinds of clients.
const KIND: u64 = 3;
/// Mean pause between two writes, in milliseconds.
const THINK_MS: u64 = 500;

/// Writes random settings until the workload is over. Replica 1 also registers the first backends.
pub(super) async fn write(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let client = handles.context.next_client();
    let mut first = match handles.run {
        ReplicaRun {
            replica: ReplicaId(1),
            number: 1,
        } => first_backends(),
        _ => Vec::new(),
    };
    let is_plain = handles.context.seed.is_multiple_of(4);
    while !handles.context.is_over() {
        let mean_ms = if first.is_empty() { THINK_MS } else { 1 };
        think(&mut rng, mean_ms).await;
        if !handles.view.registry().initialised || handles.context.is_over() {
            continue;
        }
        let command = match first.pop() {
            Some(spec) => Command::PutBackend(spec),
            None => command(&mut rng, is_plain),
        };
        submit(&handles, client, command).await;
    }
}

/// Submits a command and records the operation. Returns `None` if it is not known to be committed.
pub(super) async fn submit(
    handles: &ReplicaHandles,
    client: u32,
    command: Command,
) -> Option<Committed> {
    let what = name(&command);
    let (run, called_us) = (handles.run, handles.now_us());
    let ticket = handles.context.ledger.with(|record| {
        let action = Action::Write(command.clone());
        record.history.call(client, run, called_us, action)
    });
    let written = handles.cluster.submit(command).await;
    let committed = written.as_ref().ok().cloned();
    let (outcome, how) = match written {
        Ok(committed) => {
            let how = match &committed.reply {
                Reply::Rejected(_) => "rejected",
                Reply::Applied | Reply::Batch(_) | Reply::Repeated(_) => "ok",
            };
            (OperationResult::Written(committed), how)
        }
        Err(ProposeError::Unavailable(_)) => (OperationResult::Refused, "refused"),
        Err(ProposeError::Unknown(_) | ProposeError::Stopping) => {
            (OperationResult::Unknown, "unknown")
        }
    };
    handles.context.count(what, how);
    let now_us = handles.now_us();
    handles.context.ledger.with(|record| {
        let told = record.outcome_if_trusted(run, outcome);
        record.history.answer(ticket, now_us, told);
    });
    committed
}

fn name(command: &Command) -> &'static str {
    match command {
        Command::PutBackend(_) => "put-backend",
        Command::DeleteBackend { .. } => "delete-backend",
        Command::SetDraining { .. } => "drain",
        Command::Discover(_) => "discover",
        Command::PutPolicy(_) => "put-policy",
        Command::PutRouting(_) => "put-routing",
        Command::PutAdmission(_) => "put-admission",
        Command::ConfigureUser { .. } => "configure-user",
        Command::PutUserDefaults(_) => "put-defaults",
        Command::CreateKey(_) => "create-key",
        Command::RotateKey { .. } => "rotate-key",
        Command::ForgiveUser { .. } => "forgive",
        Command::RevokeKey { .. } => "revoke-key",
        _ => "other",
    }
}

/// Draws a command. With `is_plain`, no setting charges by predictions or through the log, so that
/// advances can be checked from outside.
fn command(rng: &mut Rng, is_plain: bool) -> Command {
    match rng.below(24) {
        0..=5 => {
            let capacity = [None, Some(24), Some(64), Some(96), Some(400)];
            let capacity = capacity[rng.below(5) as usize];
            let life = u64::from(rng.below(6) == 0);
            Command::PutBackend(backend(rng.below(BACKENDS), life, capacity))
        }
        6 => Command::DeleteBackend {
            name: format!("b{}", rng.below(BACKENDS)),
        },
        7..=8 => Command::SetDraining {
            name: format!("b{}", rng.below(BACKENDS)),
            draining: rng.below(3) == 0,
            moves_streams: rng.below(2) == 0,
        },
        9..=10 => {
            let name = user(rng);
            let weight_milli = [500, 1000, 3000][rng.below(3) as usize];
            Command::configure_user(name, UserSettings::of_weight(weight_milli))
        }
        11..=12 => {
            let policies = PolicyConfig::defaults();
            let at = rng.below(policies.len() as u64) as usize;
            Command::PutPolicy(policies[at].clone())
        }
        13 => Command::PutRouting(RoutingSettings {
            learn: rng.below(2) == 0,
            prediction_off_permille: rng.within(50, 500),
            assumed_blocks: rng.within(16, 100_000),
            ..RoutingSettings::default()
        }),
        14..=16 => {
            let mut settings = admission(rng);
            if is_plain {
                settings.order = Order::Vtc;
            }
            Command::PutAdmission(settings)
        }
        17..=18 => Command::CreateKey(Box::new(api_key(rng))),
        19 => Command::RevokeKey {
            id: ApiKeyId(rng.below(API_KEYS)),
        },
        20 => plan(rng),
        _ => {
            let name = user(rng);
            limit(name, limits(rng))
        }
    }
}

/// Draws an API key with its own secret.
fn api_key(rng: &mut Rng) -> ApiKeySpec {
    let secret = secret(rng);
    ApiKeySpec {
        id: ApiKeyId(rng.below(API_KEYS)),
        secret,
        name: "sim".to_owned(),
        user: user(rng),
        ..ApiKeySpec::default()
    }
}

pub(super) fn secret(rng: &mut Rng) -> SecretHash {
    let mut secret = [0; 32];
    secret[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
    SecretHash(secret)
}

/// Draws settings of a user: an unreachable budget or none, and sometimes a weight.
fn plan(rng: &mut Rng) -> Command {
    let tokens = [None, Some(1 << 40), Some(1 << 41)];
    let budget = Budget {
        day: tokens[rng.below(3) as usize],
        month: tokens[rng.below(3) as usize],
    };
    let name = user(rng);
    let settings = UserSettings {
        weight_milli: (rng.below(2) == 0).then_some(1500),
        budget: Some(budget),
        ..UserSettings::default()
    };
    Command::configure_user(name, settings)
}

/// Returns a command that sets limits of a user and, for some limits, also a weight.
fn limit(name: String, limits: UserLimits) -> Command {
    let is_weighed = limits.tokens.is_some() || limits.window_ms.is_some();
    let settings = UserSettings {
        weight_milli: is_weighed.then_some(2000),
        limits: Some(limits),
        ..UserSettings::default()
    };
    Command::configure_user(name, settings)
}

fn admission(rng: &mut Rng) -> AdmissionSettings {
    let orders = [
        Order::Vtc,
        Order::VtcMaxFair,
        Order::VtcPred,
        Order::Dlpm,
        Order::Lcf,
        Order::Rpm,
        Order::Fcfs,
    ];
    let concurrency = [
        Concurrency::Adaptive,
        Concurrency::Unlimited,
        Concurrency::Fixed(rng.within(1, 6)),
    ];
    let charge = [
        ChargeInput::Uncached,
        ChargeInput::Full,
        ChargeInput::Discounted,
    ];
    AdmissionSettings {
        order: orders[rng.below(7) as usize],
        concurrency: concurrency[rng.below(3) as usize],
        max_queue: [4, 100, 10_000][rng.below(3) as usize],
        max_wait_ms: [300, 3000, 60_000][rng.below(3) as usize],
        charge: charge[rng.below(3) as usize],
        bins: [1, 1, 4][rng.below(3) as usize],
        bin_selection: BinSelection::RoundRobin,
        batching: match rng.below(6) {
            0 => Batching::Static,
            _ => Batching::Continuous,
        },
        ..AdmissionSettings::default()
    }
}

fn limits(rng: &mut Rng) -> UserLimits {
    let mut some = |least, most| (rng.below(3) == 0).then(|| rng.within(least, most));
    UserLimits {
        requests: some(2, 50),
        tokens: some(500, 20_000).map(u64::from),
        concurrent: some(1, 6),
        window_ms: some(500, 5000),
        ..UserLimits::default()
    }
}
