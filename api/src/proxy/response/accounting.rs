//! Accounts for a response in transit: charges its attempt, tells the circuit what the engine
//! answered, and completes the metrics of its request.

use http::StatusCode;
use tokio::time::Instant;

use super::answer_usage::AnswerDelta;
use crate::proxy::record::metrics::{RequestMetricsGuard, RequestOutcome};
use crate::routing::{Attempt, AttemptEnd, ChargeCommit};

/// Charge of a response's attempt, and metrics of its request.
pub(super) struct RequestAccounting {
    /// Attempt that is charged; `None` once it has ended.
    attempt: Option<Attempt>,
    pub(super) request_metrics: Option<RequestMetricsGuard>,
    /// Outcome of the request once the client has received everything.
    outcome: Option<RequestOutcome>,
    has_begun: bool,
    has_output: bool,
    /// Whether a stream has said why it ends.
    has_reason: bool,
    /// Status that the error in the response stands for; `None` if it reports none.
    error: Option<StatusCode>,
    choices: ChoiceTokens,
}

/// Output tokens by choice. In a chunk with one choice, vLLM and SGLang report only that choice's
/// tokens. The final usage without choices is the sum.
#[derive(Default)]
struct ChoiceTokens(Vec<(u64, u64)>);

/// Maximum number of choices counted separately.
const CHOICES_MAX: usize = 1024;

impl ChoiceTokens {
    /// Returns the tokens of all choices after `choice` has reached `tokens`.
    fn sum(&mut self, choice: u64, tokens: u64) -> u64 {
        if let Some((_, known)) = self.0.iter_mut().find(|(index, _)| *index == choice) {
            *known = tokens.max(*known);
        } else if self.0.len() < CHOICES_MAX {
            self.0.push((choice, tokens));
        }
        self.0
            .iter()
            .fold(0, |sum, (_, tokens)| sum.saturating_add(*tokens))
    }
}

impl RequestAccounting {
    /// Creates the accounting of `attempt`; `None` for an engine's error, which has ended it.
    pub(super) fn new(attempt: Option<Attempt>) -> Self {
        Self {
            attempt,
            request_metrics: None,
            outcome: None,
            has_begun: false,
            has_output: false,
            has_reason: false,
            error: None,
            choices: ChoiceTokens::default(),
        }
    }

    /// Whether a stream has had output.
    pub(super) fn has_output(&self) -> bool {
        self.has_output
    }

    /// Returns the status that the error in the response stands for; `None` if it reports none.
    pub(super) fn error(&self) -> Option<StatusCode> {
        self.error
    }

    /// Records the first data of the body, once.
    pub(super) fn begins(&mut self) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        if let Some(attempt) = &mut self.attempt {
            attempt.first_byte(Instant::now());
            let request_metrics = self.request_metrics.iter();
            request_metrics.for_each(RequestMetricsGuard::first_byte);
        }
    }

    /// Records that the engine has answered, although its response is no stream.
    pub(super) fn is_answered(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt.answered(Instant::now());
        }
    }

    /// Records what an event of a stream contains.
    pub(super) fn note_event(&mut self, findings: &AnswerDelta<'_>) {
        if findings.has_output && !std::mem::replace(&mut self.has_output, true) {
            self.begins();
            if let Some(attempt) = &mut self.attempt {
                attempt.first_token(Instant::now());
                let request_metrics = self.request_metrics.iter_mut();
                request_metrics.for_each(RequestMetricsGuard::first_token);
            }
        }
        self.has_reason |= findings.ends_choice || findings.ends_stream;
        self.note(findings);
    }

    /// Records the end of a stream. One that ends without output or a reason is an error.
    pub(super) fn stream_ends(&mut self) {
        if !self.has_output && !self.has_reason {
            self.fails(StatusCode::BAD_GATEWAY, || {
                "the response ended without output".to_owned()
            });
        }
    }

    /// Records an error in a response whose status was a success, the first one only.
    fn fails(&mut self, status: StatusCode, why: impl FnOnce() -> String) {
        let Some(attempt) = self.attempt.as_mut().filter(|_| self.error.is_none()) else {
            return;
        };
        self.error = Some(status);
        attempt.reports_error(status.is_server_error(), Instant::now());
        if let Some(request_metrics) = &mut self.request_metrics {
            request_metrics.fails_because(why());
        }
    }

    /// Records the content of an event or a whole document.
    pub(super) fn note(&mut self, findings: &AnswerDelta<'_>) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let now = Instant::now();
        // The text comes first, because a usage report covers the text in the same document.
        if let Some(text) = &findings.text {
            attempt.output(text, now);
        }
        if !findings.token_ids.is_empty() {
            // Ids that cannot be read are missed in the sum, so that none count.
            let ids = serde_json::from_slice::<Vec<u32>>(findings.token_ids);
            attempt.output_ids(&ids.unwrap_or_default());
        }
        attempt.other_output(findings.other_bytes, now);
        if let Some(mut usage) = findings.usage {
            if let Some(choice) = findings.choice {
                usage.completion_tokens = self.choices.sum(choice, usage.completion_tokens);
            }
            attempt.usage(usage, now);
        }
        if let Some(status) = findings.error {
            self.fails(status, || {
                format!("the response contains an error: {}", status.as_u16())
            });
        }
    }

    /// Notes that all output was parsed, so that none is hidden.
    pub(super) fn is_all_seen(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt.set_hidden_output(None);
        }
    }

    /// Returns the attempt; `None` if it has ended.
    pub(super) fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    /// Takes the attempt of a stream that goes on elsewhere; `None` if it has ended.
    pub(super) fn take_attempt(&mut self) -> Option<Attempt> {
        self.attempt.take()
    }

    /// Forgets the error of a response that is complete nevertheless.
    pub(super) fn forgives(&mut self) {
        self.error = None;
    }

    /// Goes on with the attempt that continues the stream.
    pub(super) fn continues(&mut self, mut attempt: Attempt) {
        attempt.first_token(Instant::now());
        self.attempt = Some(attempt);
        self.error = None;
    }

    pub(super) fn end(&mut self, end: AttemptEnd, outcome: RequestOutcome) {
        if let Some(attempt) = self.attempt.take() {
            attempt.end(end, Instant::now());
        }
        self.outcome = Some(outcome);
    }

    /// Ends the accounting of a finished response and returns a future of the charge's commit,
    /// unless it is committed already.
    pub(super) fn end_durably(
        &mut self,
        end: AttemptEnd,
        outcome: RequestOutcome,
    ) -> Option<ChargeCommit> {
        self.outcome = Some(outcome);
        let attempt = self.attempt.take()?;
        attempt.end_durably(end, Instant::now())
    }

    /// Completes the request's metrics after the client has received everything.
    pub(super) fn settle(&mut self) {
        if let (Some(outcome), Some(mut request_metrics)) =
            (self.outcome, self.request_metrics.take())
        {
            request_metrics.ends(outcome);
        }
    }
}
