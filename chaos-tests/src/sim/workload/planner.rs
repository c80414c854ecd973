//! Operators who set small budgets and defaults of users, forgive users, and rotate API keys.
//!
//! They are present in every fifth seed and draw separately, so that other worlds are unchanged.

use lab::rng::Rng;
use state::budgets::Budget;
use state::command::{Command, UserDefaults, UserSettings};
use state::ids::ApiKeyId;

use super::{API_KEYS, ReplicaHandles, operator, think, user};

/// Label of these draws, which separates them from those of other kinds of clients.
const KIND: u64 = 8;
/// Divisor of the seeds whose worlds have these operators.
const SEEDS: u64 = 5;
/// Mean pause between two writes, in milliseconds.
const THINK_MS: u64 = 300;

/// Returns whether the world of a seed has these operators.
pub(super) fn is_in(seed: u64) -> bool {
    seed.is_multiple_of(SEEDS)
}

/// Writes random settings of users until the workload is over.
pub(super) async fn write(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let client = handles.context.next_client();
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        if !handles.view.registry().initialised || handles.context.is_over() {
            continue;
        }
        let command = command(&mut rng);
        operator::submit(&handles, client, command).await;
    }
}

fn command(rng: &mut Rng) -> Command {
    match rng.below(8) {
        0..=3 => plan(rng),
        4 => Command::PutUserDefaults(Box::new(defaults(rng))),
        5 => Command::ForgiveUser { name: user(rng) },
        _ => Command::RotateKey {
            id: ApiKeyId(rng.below(API_KEYS)),
            secret: operator::secret(rng),
            grace_ms: rng.below(2) * 1000,
        },
    }
}

/// Draws settings of a user: a budget, perhaps soon used up, or none, and sometimes a weight.
fn plan(rng: &mut Rng) -> Command {
    let day = [None, Some(200), Some(2000), Some(1 << 40)];
    let month = [None, Some(5000), Some(1 << 41)];
    let budget = Budget {
        day: day[rng.below(4) as usize],
        month: month[rng.below(3) as usize],
    };
    let name = user(rng);
    let settings = UserSettings {
        weight_milli: (rng.below(4) == 0).then_some(1500),
        budget: Some(budget),
        ..UserSettings::default()
    };
    Command::configure_user(name, settings)
}

/// Draws defaults of users. Their budget is unreachable, because it also applies to the clients of
/// a healed cluster.
fn defaults(rng: &mut Rng) -> UserDefaults {
    UserDefaults {
        weight_milli: [500, 1000, 2000][rng.below(3) as usize],
        budget: Budget {
            day: (rng.below(2) == 0).then_some(1 << 40),
            month: None,
        },
        ..UserDefaults::default()
    }
}
