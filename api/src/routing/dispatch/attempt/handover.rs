//! An answer that goes on at another backend after its own has failed in the middle of it.
//!
//! All attempts of such an answer charge together what one attempt would: the prompt once, and each
//! output token once. The first one charges what it has seen. Each further one begins with that
//! charge, and its usage reports are those of the whole answer, so that only what is new is due.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use state::admission::{Advance, Pricing, TokenDelta};
use state::command::Charge;
use state::ids::UserKey;
use state::streams::CarriedStream;
use state::trees::TurnUsage;
use tokio::time::Instant;

use super::{Attempt, OpenAttempt, nothing};
use crate::planted::{self, Bug};
use crate::routing::dispatch::Dispatcher;
use crate::routing::outbox::Outbox;
use crate::routing::{AttemptEnd, Usage};
use crate::sessions::NamedSession;

/// Charge of the attempts at an answer so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlierCharge {
    /// Tokens charged.
    pub(super) charged: Charge,
    /// Usage of the answer, as the engines reported it; `None` if they reported none.
    pub(super) usage: Option<Usage>,
    /// Whether an engine may have run the request, so that a session's turn counts.
    pub(super) has_run: bool,
}

impl EarlierCharge {
    /// Returns the number of output tokens reported.
    pub(super) fn output(&self) -> u64 {
        self.usage.map_or(0, |usage| usage.completion_tokens)
    }

    fn tokens(&self) -> [u64; 3] {
        let charged = &self.charged;
        [charged.input_uncached, charged.input_cached, charged.output]
    }
}

/// The attempts at a request's answer that have ended or lent their charge, until another one goes on
/// with the answer. Dropping it charges what they owe and ends the turn of the request's session.
#[derive(Default)]
pub struct EarlierAttempts(Mutex<Option<EarlierAttempt>>);

impl EarlierAttempts {
    /// Ends an attempt whose backend failed. If it may have run the request, what it charged counts for
    /// the attempt that goes on.
    pub fn hand_over(&self, attempt: Attempt, end: AttemptEnd, now: Instant) {
        let next = attempt.hand_over(end, now);
        // The attempt after one that has not run begins the answer itself.
        let Some(next) = next.filter(|next| next.charge.has_run) else {
            return;
        };
        let mut earlier = self.lock();
        match &mut *earlier {
            Some(earlier) => earlier.join(next),
            none => *none = Some(next),
        }
    }

    /// Lets another attempt begin with what `attempt` has charged, while this one goes on.
    pub fn lend(&self, attempt: &Attempt) {
        *self.lock() = attempt.lend();
    }

    /// Lets the next attempt begin with what a stream has cost that the request has taken over.
    pub(crate) fn resume(&self, earlier: EarlierAttempt) {
        *self.lock() = Some(earlier);
    }

    /// Forgets what was lent or taken over, because no other attempt goes on.
    pub fn take_back(&self) {
        self.lock().take();
    }

    /// Lets `attempt` go on with the answer of earlier attempts, if there are any, which began with
    /// `text`.
    pub fn go_on(&self, attempt: &mut Attempt, text: &str) {
        if let Some(earlier) = self.lock().take() {
            attempt.continues(earlier, text);
        }
    }

    /// Returns what the attempts have charged; `None` if there are none.
    pub fn charge(&self) -> Option<EarlierCharge> {
        self.lock().as_ref().map(EarlierAttempt::charge)
    }

    fn lock(&self) -> MutexGuard<'_, Option<EarlierAttempt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The attempts at an answer whose backends have failed. Dropping it without
/// [`Attempt::continues`] ends the turn of the request's session, as the answer does not go on.
#[must_use]
pub(crate) struct EarlierAttempt {
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(super) session: Option<NamedSession>,
    pub(super) charge: EarlierCharge,
    /// The resumable stream that the attempts carry, if they do.
    pub(super) carried: Option<CarriedStream>,
    /// What is owed if no other attempt goes on; `None` if everything is charged.
    pub(super) debt: Option<Debt>,
}

/// What another attempt reports if it goes on: the estimated prompt of an attempt that ended before its
/// engine reported anything, or what the client of a resumable stream has received and the
/// log has not charged.
pub(super) struct Debt {
    pub(super) estimate: Charge,
    /// Charge made in advance, from which it is paid.
    pub(super) advance: Advance,
    pub(super) pricing: Pricing,
}

impl EarlierAttempt {
    /// Returns what the attempts have charged.
    pub(crate) fn charge(&self) -> EarlierCharge {
        self.charge
    }

    /// Adds a further attempt that failed too.
    pub(crate) fn join(&mut self, mut next: Self) {
        self.charge = EarlierCharge {
            has_run: self.charge.has_run || next.charge.has_run,
            ..next.charge
        };
        self.session = self.session.or(next.session.take());
        let debt = next.debt.take();
        self.debt = self.debt.take().or(debt);
    }

    /// Charges what is owed, because no other attempt goes on.
    fn pay(&mut self) {
        let Some(mut debt) = self.debt.take() else {
            return;
        };
        let estimate = &debt.estimate;
        let used = TokenDelta {
            input_uncached: estimate.input_uncached,
            input_cached: estimate.input_cached,
            output: estimate.output,
        };
        let user = estimate.user;
        let dispatcher = &self.dispatcher;
        dispatcher.outbox.with(|outbox| {
            let ledger = &mut outbox.ledger;
            let charge = Charge {
                source: self.charge.charged.source,
                ..ledger.settle(user, &mut debt.advance, &used, &debt.pricing)
            };
            dispatcher.priced.add(debt.pricing.due(&charge));
            outbox.charge_for(self.carried, charge);
            close_advance(outbox, (user, self.carried), debt.advance);
        });
        let charged = &mut self.charge.charged;
        charged.input_uncached += used.input_uncached;
        charged.input_cached += used.input_cached;
        charged.output += used.output;
    }
}

impl Drop for EarlierAttempt {
    fn drop(&mut self) {
        self.pay();
        let Some(session) = self.session.filter(|_| self.charge.has_run) else {
            return;
        };
        let [input_uncached, input_cached, output] = self.charge.tokens();
        let used = TurnUsage {
            input_uncached,
            input_cached,
            output,
        };
        let dispatcher = &self.dispatcher;
        let payer = (self.charge.charged.user, self.carried);
        (dispatcher.outbox).with(|outbox| dispatcher.end_turn(outbox, session, used, payer));
    }
}

impl Attempt {
    /// Ends an attempt like [`Attempt::end`], whose backend failed although it may have generated
    /// output; `None` if it had ended. The answer may go on at another backend, so the session's
    /// turn does not end yet.
    pub(crate) fn hand_over(mut self, end: AttemptEnd, now: Instant) -> Option<EarlierAttempt> {
        let dispatcher = Arc::clone(&self.dispatcher);
        let is_lost = self.is_taken_over();
        let open = self.open.as_mut()?;
        if is_lost {
            open.is_lost();
        }
        let session = open.session.take();
        let is_unknown = open.usage.is_none() && open.unreported_bytes == 0;
        let owes = !open.owes && end != AttemptEnd::NotRun && is_unknown;
        let debt = owes.then(|| Debt {
            estimate: open.due(open.usage_or_estimate(&dispatcher, end, now)),
            advance: std::mem::take(&mut open.advance),
            pricing: open.pricing,
        });
        open.owes |= owes;
        let carried = open.carried;
        let mut charge = self.close(end, now)?;
        charge.has_run |= charge.usage.is_some();
        Some(EarlierAttempt {
            dispatcher,
            session,
            charge,
            carried,
            debt,
        })
    }

    /// Lends the charge so far to an attempt that may go on with the answer instead; `None` if this
    /// one has ended.
    pub(crate) fn lend(&self) -> Option<EarlierAttempt> {
        let open = self.open.as_ref()?;
        let dispatcher = &self.dispatcher;
        Some(EarlierAttempt {
            dispatcher: Arc::clone(dispatcher),
            session: None,
            charge: EarlierCharge {
                charged: open.charged,
                usage: open.usage,
                has_run: false,
            },
            carried: open.carried,
            debt: None,
        })
    }

    /// Takes the place of the attempt `before`, which has lent its charge to this one and ends thus.
    pub fn replaces(&mut self, before: Self, end: AttemptEnd, now: Instant) {
        if let Some(earlier) = before.hand_over(end, now) {
            self.continues(earlier, "");
        }
    }

    /// Goes on with the answer of `earlier`, which began with `text`. The attempt was dispatched
    /// with its charge.
    pub(crate) fn continues(&mut self, mut earlier: EarlierAttempt, text: &str) {
        if let Some(open) = &mut self.open {
            open.session = earlier.session.take();
            open.earlier = Some(earlier.charge);
            open.charged = Charge {
                source: open.charged.source,
                ..match planted::is(Bug::AnswerPaidAgain) {
                    true => nothing(self.user),
                    false => earlier.charge.charged,
                }
            };
            open.usage = earlier.charge.usage;
            open.owes = false;
            if let Some(debt) = earlier.debt.take() {
                // What this attempt reports is paid from the first one's advance.
                open.advance = debt.advance;
            }
            if let Some(reply) = &mut open.reply {
                reply.push(text);
            }
        }
    }
}

impl OpenAttempt {
    /// Turns the unused advance into credit.
    pub(super) fn close_advance(&self, outbox: &mut Outbox) {
        close_advance(outbox, (self.charged.user, self.carried), self.advance);
    }

    /// Returns the tokens that this attempt charged, without those of earlier ones: uncached and
    /// cached input, and output.
    pub(super) fn own_charge(&self) -> [u64; 3] {
        let earlier = self.earlier.map_or([0; 3], |earlier| earlier.tokens());
        let charged = &self.charged;
        let charged = [charged.input_uncached, charged.input_cached, charged.output];
        std::array::from_fn(|at| charged[at].saturating_sub(earlier[at]))
    }
}

/// Turns the unused `advance` of a request into credit of its user. A stream's next carrier does not
/// get it then.
fn close_advance(
    outbox: &mut Outbox,
    (user, carried): (UserKey, Option<CarriedStream>),
    advance: Advance,
) {
    outbox.ledger.close(user, advance);
    if let Some(carried) = carried.filter(|_| advance.left() > 0) {
        outbox.close_stream(user, carried);
    }
}
