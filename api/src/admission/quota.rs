//! Checks a user's rate limits and budgets before a request is routed or queued.
//!
//! The replicated state counts the usage at all replicas; this replica's unapplied usage is added.
//! Nothing is reserved between a check and the charge that follows it: requests that are admitted
//! in between, on other threads or replicas, become debt.

use state::admission::PendingCharges;
use state::budgets::BudgetPeriod;
use state::ids::{AgentSessionKey, UserKey};
use state::permits::PermitSubject;
use state::quotas::{CONCURRENT_RETRY_MS, LimitKind, LimitRejection, PendingUse, Quota};

use super::{Admission, AdmissionRequest, LimitPreview};
use crate::routing::{PermitRejection, RoutingRequest, UserPermit};
use crate::sessions::NamedSession;

/// What is left of a user's rate limits and budgets. A field is `None` if there is no such limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LimitsLeft {
    pub(crate) requests: Option<LimitPreview>,
    /// The token limit or budget with the least left.
    pub(crate) tokens: Option<LimitPreview>,
}

impl Admission {
    /// Returns what is left of a user's limits and budgets, less this replica's unapplied usage;
    /// `None` if the user has none.
    pub(crate) fn limits_left(&self, user: UserKey) -> Option<LimitsLeft> {
        let Quota { limits, budget, .. } = self.view.quota(user);
        let has_window = limits.requests.is_some() || limits.tokens.is_some();
        if !has_window && budget.budget.is_unbounded() {
            return None;
        }
        let (mut requests, mut tokens) = (None, None);
        for left in self.limits_preview(user) {
            match left.limit {
                LimitKind::Concurrent | LimitKind::ConcurrentPerTree => {}
                LimitKind::Requests => requests = Some(left),
                _ => tokens = tokens.into_iter().chain([left]).min_by_key(|it| it.left),
            }
        }
        Some(LimitsLeft { requests, tokens })
    }

    /// Returns what is left of each of a user's limits and budgets, less this replica's unapplied
    /// usage.
    pub(super) fn limits_preview(&self, user: UserKey) -> Vec<LimitPreview> {
        let (quota, pending) = self.usage(user);
        let now_ms = self.log_time.present_ms(self.view.now_ms());
        let (limits, left) = (quota.limits, quota.left(now_ms));
        let [requests_ms, tokens_ms] = quota.resets_ms(now_ms);
        let requests = pending.requests.saturating_sub(pending.dequeued);
        let open = requests.saturating_sub(pending.ended);
        let of = |(limit, most, left, used, resets): (_, Option<u64>, Option<u64>, u64, _)| {
            Some(LimitPreview {
                limit,
                of: most?,
                left: left?.saturating_sub(used),
                resets_in_ms: resets,
            })
        };
        let window = [
            (
                LimitKind::Requests,
                limits.requests.map(u64::from),
                left.requests,
                requests,
                Some(requests_ms),
            ),
            (
                LimitKind::Tokens,
                limits.tokens,
                left.tokens,
                pending.tokens,
                Some(tokens_ms),
            ),
            (
                LimitKind::Concurrent,
                limits.concurrent.map(u64::from),
                left.concurrent,
                open,
                None,
            ),
        ];
        let unix_ms = self.clock.unix_ms();
        let budgets = BudgetPeriod::ALL.into_iter().filter_map(|period| {
            let left = quota.budget.left(period, unix_ms, pending.billed_tokens)?;
            Some(LimitPreview {
                limit: LimitKind::from(period),
                of: left.limit,
                left: left.tokens(),
                resets_in_ms: Some(left.resets_at_ms.saturating_sub(unix_ms)),
            })
        });
        window.into_iter().filter_map(of).chain(budgets).collect()
    }

    /// Updates the clock of the rate limits from the replicated time. Call this often, because the
    /// clock adds the time that has passed since.
    pub fn pass_time(&self) {
        self.log_time.present_ms(self.view.now_ms());
    }

    /// Checks whether the user may have one more request, and takes a permit for it if the user has
    /// a limit on concurrent requests. If the user's issuer does not answer in time, the replicated
    /// counts decide.
    ///
    /// # Errors
    /// Returns a [`LimitRejection`] for a used-up budget or a limit that the request would exceed.
    pub(super) async fn take_permit(
        &self,
        candidate: &dyn AdmissionRequest,
    ) -> Result<(), LimitRejection> {
        let ask = candidate.ask(&[]);
        let user = ask.user.key(self.view.registry().hash_seed);
        // Nobody waits in vain for a permit.
        self.check_limits(user, None)?;
        self.check_tree(user, ask.session)?;
        let limits = self.view.quota(user).limits;
        // The tree comes first: a request that its tree's limit refuses keeps no permit of the user
        // from the user's other agents.
        let of_tree = match limits.concurrent_per_tree.zip(self.root(ask.session)) {
            Some((limit, root)) => {
                let tree = Some(root);
                Some(self.permit_of(PermitSubject { user, tree }, limit).await?)
            }
            None => None,
        };
        let of_user = match limits.concurrent {
            Some(limit) => Some(self.permit_of(user.into(), limit).await?),
            None => None,
        };
        let permit = match (of_user, of_tree) {
            (None, None) => return Ok(()),
            (Some(of_user), of_tree) => of_user.and(of_tree),
            (None, Some(of_tree)) => of_tree,
        };
        // Others have been admitted meanwhile.
        self.check_limits(user, None)?;
        drop(candidate.permit().set(permit));
        Ok(())
    }

    /// Takes one of the `limit` permits of a user or of a tree.
    async fn permit_of(
        &self,
        subject: PermitSubject,
        limit: u32,
    ) -> Result<UserPermit, LimitRejection> {
        match self.permits.take(subject, limit).await {
            Ok(permit) => Ok(permit),
            Err(PermitRejection::Full) => Err(LimitRejection {
                limit: match subject.tree {
                    None => LimitKind::Concurrent,
                    Some(_) => LimitKind::ConcurrentPerTree,
                },
                retry_after_ms: CONCURRENT_RETRY_MS,
            }),
            Err(PermitRejection::Unconfirmed) => {
                self.metrics.unconfirmed_permits.inc();
                if subject.tree.is_none() {
                    self.check_limits(subject.user, Some(limit))?;
                }
                Ok(self.permits.take_unconfirmed(subject))
            }
        }
    }

    /// Returns the root of the session's tree; `None` without a session.
    pub(super) fn root(&self, session: Option<NamedSession>) -> Option<AgentSessionKey> {
        let session = session?;
        Some(self.view.trees().root_of(session.key, session.parent))
    }

    /// Returns what is left of the tokens of the session's tree; `None` if they are unlimited, or
    /// without a session.
    pub(super) fn tree_preview(
        &self,
        user: UserKey,
        session: Option<NamedSession>,
    ) -> Option<LimitPreview> {
        let of = self.view.quota(user).limits.tokens_per_tree?;
        let trees = self.view.trees();
        let used = trees.tree(self.root(session)?);
        Some(LimitPreview {
            limit: LimitKind::TokensPerTree,
            of,
            left: of.saturating_sub(used.map_or(0, |tree| tree.usage.tokens())),
            resets_in_ms: None,
        })
    }

    /// Checks the limit on the tokens of the session's tree.
    fn check_tree(
        &self,
        user: UserKey,
        session: Option<NamedSession>,
    ) -> Result<(), LimitRejection> {
        let Some(root) = self.root(session) else {
            return Ok(());
        };
        self.view
            .quota(user)
            .check_tree(self.view.trees().tree(root))
    }

    /// Checks whether the user may have one more request, by the replicated counts.
    ///
    /// # Errors
    /// Returns a [`LimitRejection`] for a used-up budget or a limit that the request would exceed.
    pub(super) fn check_quota(&self, ask: &RoutingRequest<'_>) -> Result<(), LimitRejection> {
        let user = ask.user.key(self.view.registry().hash_seed);
        self.check_tree(user, ask.session)?;
        self.check_limits(user, self.view.quota(user).limits.concurrent)
    }

    /// Checks the budgets and limits of `user`, with `concurrent` as the limit on concurrent
    /// requests.
    fn check_limits(&self, user: UserKey, concurrent: Option<u32>) -> Result<(), LimitRejection> {
        if self.view.quota(user).is_unbounded() {
            return Ok(());
        }
        let (mut quota, pending) = self.usage(user);
        quota.check_budget(self.clock.unix_ms(), &pending)?;
        quota.limits.concurrent = concurrent;
        let now_ms = self.log_time.present_ms(self.view.now_ms());
        quota.check(now_ms, &pending)
    }

    /// Returns the replicated usage of a user's limits, and this replica's unapplied usage.
    fn usage(&self, user: UserKey) -> (Quota, PendingUse) {
        // Order matters: a charge applied in between counts twice for a moment, never zero times.
        // (Ended requests count twice too, so concurrency limits may be exceeded by as many.)
        let unapplied = self.dispatcher.unapplied(user);
        let quota = self.view.quota(user);
        let (_, pricing) = self.rules();
        let mut pending = PendingCharges::default();
        pending.add(&unapplied, &pricing);
        (quota, pending.used(user))
    }
}
