//! Exchange between replicas: batches through the log, load reports directly.

use std::sync::Arc;

use api::routing::KEEPALIVE;
use state::Backend;
use state::admission::Backlog;
use state::codec::encode_envelope;
use state::command::{Command, Envelope, Item};
use state::ids::{LogIndex, ReplicaId};

use super::{Micros, SimEvent, SimWorld};
use crate::simulate::plan::micros;

/// Minimum interval between load reports in microseconds, as in production.
const REPORT_EVERY: Micros = 20_000;

impl SimWorld<'_> {
    /// Plans a flush and a load report after a change at `place`.
    pub(super) fn changed(&mut self, place: usize) {
        self.plan_flush(place);
        if self.plan.load_lag.is_none() {
            return;
        }
        let at = self.now.next_multiple_of(REPORT_EVERY);
        let next = &mut self.places[place].next_report;
        if at < *next {
            *next = at;
            self.events.plan(at, SimEvent::Report(place));
        }
    }

    fn plan_flush(&mut self, place: usize) {
        let here = &mut self.places[place];
        let outbox = here.replica.outbox();
        if here.is_flush_planned || outbox.is_outstanding() || outbox.is_empty() {
            return;
        }
        let is_full = outbox.is_full();
        here.is_flush_planned = true;
        let at = if is_full {
            self.now
        } else {
            self.now.max(here.last_flush + self.plan.flush)
        };
        self.events.plan(at, SimEvent::Flush(place));
    }

    pub(super) fn flush(&mut self, place: usize) {
        let here = &mut self.places[place];
        here.is_flush_planned = false;
        here.last_flush = self.now;
        let Some(envelope) = here.replica.cut(self.now) else {
            return;
        };
        self.append(place, envelope);
    }

    /// Appends an entry to the log: that of `place`, if replicas share none.
    pub(super) fn append(&mut self, place: usize, envelope: Envelope) {
        self.tally.log_entries += 1;
        self.tally.log_bytes += encode_envelope(&envelope).len() as u64;
        let envelope = Arc::new(envelope);
        match self.plan.ownership_lag {
            Some(lag) => {
                let index = self.take_index(0);
                for replica in 0..self.places.len() {
                    self.plan_apply(lag, replica, index, &envelope);
                }
            }
            None => {
                let index = self.take_index(place);
                self.plan_apply(self.plan.flush, place, index, &envelope);
            }
        }
    }

    fn take_index(&mut self, log: usize) -> LogIndex {
        let index = self.next_index[log];
        self.next_index[log] += 1;
        LogIndex(index)
    }

    fn plan_apply(
        &mut self,
        lag: Micros,
        replica: usize,
        index: LogIndex,
        envelope: &Arc<Envelope>,
    ) {
        let event = SimEvent::Apply {
            replica,
            epoch: self.epochs[replica],
            index,
            envelope: Arc::clone(envelope),
        };
        self.events.plan(self.now + lag, event);
    }

    pub(super) fn apply(&mut self, place: usize, epoch: u32, index: LogIndex, entry: &Envelope) {
        if epoch != self.epochs[place] {
            return; // Of a log that is lost.
        }
        self.note_uncharged(place, entry);
        self.places[place].replica.apply(index, entry);
        self.follow(place, entry);
        self.plan_flush(place);
        self.pump(place);
    }

    pub(super) fn report(&mut self, place: usize) {
        let Some(lag) = self.plan.load_lag else {
            return;
        };
        let here = &mut self.places[place];
        if here.next_report != self.now {
            return; // An earlier one took its place.
        }
        let replica = &mut here.replica;
        let due = replica.due_report(self.now);
        let backlog = here.queue.backlog(self.now, &replica.counters());
        let is_news = due.is_some() || backlog != here.last_backlog;
        here.last_backlog = backlog;
        here.next_report = Micros::MAX;
        // Without repetition, peers forget what runs or waits here.
        let registry = replica.state.view().registry();
        let runs = |backend: &Backend| replica.load().here(backend.handle).running > 0;
        let is_busy = backlog.is_some() || registry.backends.iter().any(runs);
        if is_busy {
            here.next_report = self.now + micros(KEEPALIVE);
            self.events.plan(here.next_report, SimEvent::Report(place));
        }
        if !is_news {
            return;
        }
        let report: Option<Arc<[u8]>> = due.map(Arc::from);
        for replica in (0..self.places.len()).filter(|it| *it != place) {
            let event = SimEvent::Heard {
                replica,
                from: place,
                report: report.clone(),
                backlog,
            };
            self.events.plan(self.now + lag, event);
        }
    }

    pub(super) fn heard(
        &mut self,
        place: usize,
        from: usize,
        report: Option<&[u8]>,
        backlog: Option<Backlog>,
    ) {
        let from = id_of(from);
        let here = &mut self.places[place];
        if let Some(report) = report {
            here.replica
                .load()
                .merge_report(from, report, here.replica.instant(self.now))
                .expect("a report that a load table made");
        }
        here.queue.told(from, backlog, self.now);
        self.pump(place);
    }

    /// Plans another check of the queue at `place` after the given time.
    pub(super) fn wake_in(&mut self, place: usize, after: Micros) {
        let at = self.now + after.max(1);
        let next = &mut self.places[place].next_wake;
        if at < *next || *next <= self.now {
            *next = at;
            self.events.plan(at, SimEvent::Wake(place));
        }
    }

    pub(super) fn wake(&mut self, place: usize) {
        if self.places[place].next_wake == self.now {
            self.places[place].next_wake = Micros::MAX;
            self.pump(place);
            self.look_again(place);
        }
    }

    /// Records the service that the replica does not know to be charged, for users whom `entry`
    /// charges. It is largest just before the replica applies `entry`.
    fn note_uncharged(&mut self, place: usize, entry: &Envelope) {
        let Command::Batch { items, .. } = &entry.command else {
            return;
        };
        for item in items {
            let Item::Charge(charge) = item else { continue };
            let Some(user) = self.keys.iter().position(|key| *key == charge.user) else {
                continue;
            };
            let known = self.places[place].replica.charged_milli(charge.user);
            let uncharged = self.tally.service.milli(user).saturating_sub(known);
            self.tally.uncharged_milli = self.tally.uncharged_milli.max(uncharged);
        }
    }
}

fn id_of(place: usize) -> ReplicaId {
    ReplicaId(u8::try_from(place + 1).expect("replicas are counted in 8 bits"))
}
