//! A user of a healed cluster who exceeds its limits, waits for a window and sends another request.

use std::time::Duration;

use state::budgets::Budget;
use state::command::{Command, UserSettings};
use state::quotas::UserLimits;
use state::{STAMP_LATE_MS_MAX, UNANIMOUS_MS};

use super::chat::ask_as;
use super::wait::OVER_LIMIT;
use super::{ReplicaHandles, operator};

/// Label of this user's draws, which separates them from those of other kinds of clients.
const KIND: u64 = 6;
/// Length of the user's window, in milliseconds.
const WINDOW_MS: u32 = 1000;
/// Maximum number of requests until the user exceeds its limit of one.
const REQUESTS_MAX: u32 = 5;
/// Time in addition to the window until usage is in the log. It includes the pause of replicated
/// time after clock corrections: the time until stamps agree, plus a stamp's allowed lateness.
const LAG: Duration = Duration::from_millis(1000 + UNANIMOUS_MS + STAMP_LATE_MS_MAX);

/// Reports an error if the user's limit still applies after its window (I51).
pub(super) async fn wait_out(handles: &ReplicaHandles, client: u32) {
    let mut rng = handles.rng(KIND, 0);
    let user = format!("waits-{}", handles.run.replica);
    let enough = Some(1 << 50);
    let limits = UserLimits {
        requests: Some(1),
        tokens: enough,
        tokens_per_tree: enough,
        window_ms: Some(WINDOW_MS),
        ..UserLimits::default()
    };
    let settings = UserSettings {
        limits: Some(limits),
        budget: Some(Budget {
            day: enough,
            month: enough,
        }),
        ..UserSettings::default()
    };
    operator::submit(handles, client, Command::configure_user(&user, settings)).await;
    let mut requests = 0;
    while requests < REQUESTS_MAX {
        requests += 1;
        let id = format!("{}-over-{requests}", handles.run);
        if ask_as(handles, &mut rng, &user, id).await == OVER_LIMIT {
            break;
        }
    }
    // Without a backend nothing is used, and slow backends take longer than the window.
    if requests == REQUESTS_MAX {
        handles.context.count("over its limit", "never");
        return;
    }
    let window = Duration::from_millis(u64::from(WINDOW_MS) * u64::from(requests));
    tokio::time::sleep(window + LAG).await;
    let id = format!("{}-waited", handles.run);
    if ask_as(handles, &mut rng, &user, id).await == OVER_LIMIT {
        let detail = format!("{user} waited for {window:?} and is over its limit");
        handles
            .context
            .ledger
            .report_error(format!("I51: {detail}"));
    } else {
        handles.context.count("over its limit", "served");
    }
}
