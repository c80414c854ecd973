//! Tests the outbox driver on paused time: what it proposes again, and when it stops.

use super::*;

fn driver<'a>(
    outbox: &'a SharedOutbox,
    port: &'a Port,
    applied: &'a (dyn Fn() -> LogIndex + Send + Sync),
) -> OutboxDriver<'a> {
    let flush_interval = OutboxSettings::default().flush_interval;
    OutboxDriver {
        outbox,
        propose: port,
        applied,
        metrics: DriverMetrics::default(),
        flush_interval,
        clock: Clock::default(),
    }
}

fn charge(output: u64) -> Charge {
    Charge {
        user: user("ada"),
        output,
        ..Charge::default()
    }
}

#[tokio::test(start_paused = true)]
async fn the_outbox_driver_retries_and_drains_at_shutdown() {
    let port = Port::new(Log::new(&[None]));
    let desk = SharedOutbox::new(outbox(OutboxSettings::default()));
    let view = port.log.lock().unwrap().state.view();
    let applied = || view.applied();
    let driver = driver(&desk, &port, &applied);
    let faults = [Fault::Lost, Fault::Refused, Fault::AnswerLost, Fault::Lost];
    port.faults.lock().unwrap().extend(faults);
    desk.with(|outbox| outbox.charge(charge(1)));
    let stop = CancellationToken::new();
    let later = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(driver.metrics.retries.get(), 4);
        assert_eq!(driver.metrics.flushes.get(), 1);
        desk.with(|outbox| outbox.charge(charge(2)));
        stop.cancel();
    };
    let (left, ()) = tokio::join!(driver.run(stop.clone(), Duration::from_secs(1)), later);
    assert_eq!(left.queued_items, 0);
    let seqs: Vec<_> = port
        .proposed
        .lock()
        .unwrap()
        .iter()
        .map(|origin| origin.seq)
        .collect();
    assert_eq!(seqs, [1, 1, 1, 1, 1, 2]);
    assert_eq!(
        port.log
            .lock()
            .unwrap()
            .state
            .user(user("ada"))
            .unwrap()
            .total
            .output,
        3
    );
}

#[tokio::test(start_paused = true)]
async fn the_outbox_driver_stops_at_the_end_of_the_drain() {
    let port = Port::new(Log::new(&[None]));
    let desk = SharedOutbox::new(outbox(OutboxSettings::default()));
    let applied = || LogIndex(0);
    let driver = driver(&desk, &port, &applied);
    port.faults.lock().unwrap().extend([Fault::Refused; 1000]);
    desk.with(|outbox| outbox.charge(charge(1)));
    let stop = CancellationToken::new();
    stop.cancel();
    let left = driver.run(stop, Duration::from_secs(3)).await;
    assert_eq!(left.queued_items, 1);
    let tries = port.proposed.lock().unwrap().len();
    assert!((5..20).contains(&tries), "{tries} tries in three seconds");
}

#[tokio::test(start_paused = true)]
async fn the_outbox_driver_ends_when_the_replica_stops() {
    let port = Port::new(Log::new(&[None]));
    let desk = SharedOutbox::new(outbox(OutboxSettings::default()));
    let applied = || LogIndex(0);
    port.faults.lock().unwrap().push(Fault::Stopping);
    desk.with(|outbox| outbox.charge(charge(1)));
    let left = driver(&desk, &port, &applied)
        .run(CancellationToken::new(), Duration::ZERO)
        .await;
    assert_eq!(left.queued_items, 1);
}
