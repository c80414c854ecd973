//! A short day, from no engine to some and back.

use std::time::Duration;

use state::admission::{AdmissionSettings, CODEL_TARGET_MS};

use super::*;
use crate::simulate::plan::ClientModel;
use crate::simulate::workload::Mix;

const MINUTE: Micros = 60_000_000;

/// Returns a day of an hour, with engines of three places.
fn short_day() -> DayTrial {
    let mix = Mix {
        rate: 0.4,
        duration: 60 * MINUTE,
        ..Mix::day()
    };
    let plan = SimPlan {
        scaling: Some(ScalingPlan {
            rule: ScalingRule::Wanted(15_000_000),
            start: MINUTE / 2,
            hold: HOLD,
        }),
        engine: EngineModel::Continuous(DayTrial::ENGINE),
        backends: 12,
        replicas: 1,
        admission: AdmissionSettings {
            concurrency: Concurrency::Fixed(3),
            ..AdmissionSettings::default()
        },
        clients: ClientModel {
            retries: DayTrial::RETRIES,
            ..ClientModel::default()
        },
        codel_target: Duration::from_millis(CODEL_TARGET_MS),
        learn: true,
        horizon: mix.duration,
        ..SimPlan::default()
    };
    DayTrial::new(plan, mix.generate(1)).unwrap()
}

#[test]
fn a_day_from_zero_engines_to_many_and_back_fails_no_request() {
    let comparison = short_day().run(String::new(), |_| {});
    for run in &comparison.runs {
        assert_eq!(run.faults, Vec::<String>::new(), "{}", run.label);
        assert_eq!(run.refused + run.abandoned, 0, "{}", run.label);
    }
    let [scaler, schedule] = &comparison.runs[..] else {
        panic!("{:#?}", comparison.verdicts);
    };
    assert!(schedule.ttft_ms.p99 <= scaler.ttft_ms.p99);
    let fleet = scaler.fleet.unwrap();
    assert!(fleet.held > 0 && fleet.most >= 4, "{fleet:?}");
    // Five minutes, for which engines are held, are much of such a day.
    let ratio = hours(scaler) / hours(schedule);
    assert!((0.95..=1.2).contains(&ratio), "{ratio}");
}
