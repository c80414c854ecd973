//! Metrics of the area `users`: sums over all users, and over their sessions, in the
//! applied state. A user is never a label.

use std::fmt;

use super::{MetricsPage, ScrapedReplica};

impl ScrapedReplica {
    pub(super) fn users(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let (mut known, mut in_flight, mut waiting, mut charged) = (0, 0, 0, 0);
        self.cluster.with_state(&mut |state| {
            known = state.users_len() as u64;
            in_flight = state.users_backlogged() as u64;
            waiting = state.users_waiting() as u64;
            charged = state.users_charged();
        });
        // Counted over the published image, so that `apply` does not wait.
        let (now_ms, unix_ms) = (self.view.now_ms(), self.clock.unix_ms());
        let over = self.view.users().over_limits(now_ms, unix_ms) as u64;
        page.gauge("quorate_users_known", "Users known", &known)?;
        let (sessions, trees) = self.view.trees().counts();
        page.gauge(
            "quorate_users_sessions",
            "Sessions of agents and chats that have not ended, of all users",
            &(sessions as u64),
        )?;
        page.gauge(
            "quorate_users_session_trees",
            "Trees of these sessions: roots with all that they started",
            &(trees as u64),
        )?;
        page.gauge(
            "quorate_users_backlogged",
            "Users with requests in flight from any replica",
            &in_flight,
        )?;
        page.gauge(
            "quorate_users_waiting_cluster",
            "Users with requests waiting for a backend at any replica",
            &waiting,
        )?;
        page.gauge(
            "quorate_users_over_limits",
            "Users whose next request would be refused by their limits or budgets",
            &over,
        )?;
        page.counter(
            "quorate_users_charged_tokens",
            "Priced tokens charged to all users, forgotten ones included",
            &charged,
        )
    }
}
