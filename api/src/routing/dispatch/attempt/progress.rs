//! Progress of a response: its first data, its first output, an error within it.

use state::service::ServiceSample;
use tokio::time::Instant;

use super::Attempt;

/// How far the response to an attempt has come.
#[derive(Debug, Default)]
pub(super) struct ResponseProgress {
    /// Time of the first data of the response's body; `None` before.
    pub(super) began: Option<Instant>,
    /// Whether the engine has answered: with output, or with an error.
    pub(super) is_answered: bool,
    /// Time of a stream's first output; `None` before, and without a stream.
    pub(super) first_token: Option<Instant>,
}

impl Attempt {
    /// Records the first data of the response's body. No blocks are fetched after it. It need not be
    /// output: engines begin streams before they compute.
    pub fn first_byte(&mut self, now: Instant) {
        if let Some(open) = &mut self.open {
            open.end_prefill();
            if open.progress.began.is_none() {
                open.progress.began = Some(now);
                open.trace.iter_mut().for_each(|it| it.first_byte(now));
            }
        }
    }

    /// Records that the engine has answered: the prompt is computed, and the circuit counts a
    /// success. Later calls have no effect.
    pub fn answered(&mut self, now: Instant) {
        self.first_byte(now);
        let Some(open) = self.open.as_mut().filter(|open| !open.progress.is_answered) else {
            return;
        };
        open.progress.is_answered = true;
        open.underway.first_token();
        let backends = &self.dispatcher.backends;
        backends.report_answer(open.backend, self.user, now);
        backends.note_output(open.backend.slot, now);
        open.trial = None;
    }

    /// Records a stream's first output: text, reasoning or a tool call. Call this only for streams.
    pub fn first_token(&mut self, now: Instant) {
        self.answered(now);
        if let Some(open) = self
            .open
            .as_mut()
            .filter(|open| open.progress.first_token.is_none())
        {
            open.progress.first_token = Some(now);
            let stopwatch = &mut open.stopwatch;
            let samples = &self.dispatcher.samples;
            if open.prefill.is_some() {
                // The time covers two backends, so only gaps between tokens are counted.
                stopwatch.first_token(now, &mut ServiceSample::empty(open.backend));
                return;
            }
            samples.add(open.backend, now, |sample| {
                stopwatch.first_token(now, sample);
            });
        }
    }

    /// Records token ids of output that continues the prompt. The blocks of a response with ids are
    /// those of its ids, whatever its text.
    pub fn output_ids(&mut self, ids: &[u32]) {
        let reply = self.open.as_mut().and_then(|open| open.reply.as_mut());
        if let Some(reply) = reply.filter(|_| !ids.is_empty()) {
            reply.push_ids(ids);
        }
    }

    /// Records an error within a response whose status was a success. `is_backends_fault` is whether
    /// it stands for a server error.
    pub fn reports_error(&mut self, is_backends_fault: bool, now: Instant) {
        let Some(open) = &mut self.open else { return };
        let (backends, user) = (&self.dispatcher.backends, self.user);
        match (is_backends_fault, open.progress.is_answered) {
            (true, true) => backends.report_late_failure(open.backend, user, now),
            (true, false) => backends.report_no_answer(open.backend, Some(user), now),
            (false, true) => {}
            (false, false) => backends.report_answer(open.backend, user, now),
        }
        open.progress.is_answered = true;
        open.trial = None;
    }
}
