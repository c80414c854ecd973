//! Schedules of engines that know all requests in advance.

use crate::engine::model::EngineShape;
use crate::simulate::events::Micros;
use crate::simulate::workload::SimWorkload;

/// Mean number of requests at the engines in windows of equal length.
pub(super) struct KnownDemand {
    window: Micros,
    requests: Vec<f64>,
    /// Number of requests that an engine takes.
    places: u32,
}

impl KnownDemand {
    /// Computes the demand of a workload. A request takes as long as at an engine with all places in
    /// use.
    pub(super) fn of(
        workload: &SimWorkload,
        shape: &EngineShape,
        places: u32,
        window: Micros,
    ) -> Self {
        let decode = shape.decode.as_micros() as u64;
        let token = decode + decode * u64::from(places) / 64;
        let mut requests = Vec::new();
        for sent in &workload.arrivals {
            let until = sent.at + token * u64::from(sent.output_tokens);
            let mut from = sent.at;
            while from < until {
                let place = (from / window) as usize;
                let end = until.min((place as u64 + 1) * window);
                if requests.len() <= place {
                    requests.resize(place + 1, 0.0);
                }
                requests[place] += (end - from) as f64 / window as f64;
                from = end;
            }
        }
        Self {
            window,
            requests,
            places,
        }
    }

    /// Returns the schedule that fills `permille` thousandths of the places, with at most `most`
    /// engines: the times at which their number changes. An engine starts `start` before it is needed,
    /// and runs on if it would have to start again at once.
    pub(super) fn schedule(&self, permille: u32, start: Micros, most: u16) -> Vec<(Micros, u16)> {
        let filled = f64::from(self.places) * f64::from(permille) / 1000.0;
        let need = |requests: &f64| ((requests / filled).ceil() as u16).min(most);
        let needs: Vec<u16> = self.requests.iter().map(need).collect();
        let mut changes = Vec::new();
        for engine in 1..=needs.iter().copied().max().unwrap_or(0) {
            for (from, until) in self.runs(&needs, engine, start) {
                changes.push((from, 1));
                changes.push((until, -1));
            }
        }
        changes.sort_unstable();
        let mut engines = 0_i32;
        let mut steps: Vec<(Micros, u16)> = Vec::new();
        for (at, change) in changes {
            engines += change;
            let now = u16::try_from(engines).unwrap_or(0);
            match steps.last_mut() {
                Some(last) if last.0 == at => last.1 = now,
                _ => steps.push((at, now)),
            }
        }
        steps
    }

    /// Returns the times from start to stop of the engine that is needed whenever at least `engine` are.
    fn runs(&self, needs: &[u16], engine: u16, start: Micros) -> Vec<(Micros, Micros)> {
        let mut runs: Vec<(Micros, Micros)> = Vec::new();
        for (at, need) in (0..).step_by(self.window as usize).zip(needs) {
            if *need < engine {
                continue;
            }
            let from = u64::saturating_sub(at, start);
            match runs.last_mut() {
                Some(last) if last.1 >= from => last.1 = at + self.window,
                _ => runs.push((from, at + self.window)),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_starts_engines_in_time_and_bridges_short_gaps() {
        let known = KnownDemand {
            window: 60,
            // Of two engines, the second is needed in two windows with one between them.
            requests: vec![0.0, 0.0, 3.0, 9.0, 3.0, 9.0, 3.0, 0.0, 0.0, 0.0, 1.0],
            places: 10,
        };
        let steps = known.schedule(500, 60, 8);
        let expected = [(60, 1), (120, 2), (360, 1), (420, 0), (540, 1), (660, 0)];
        assert_eq!(steps, expected);
        let halved = known.schedule(500, 60, 1);
        assert_eq!(
            halved.iter().map(|step| step.1).max(),
            Some(1),
            "no more may run"
        );
    }
}
