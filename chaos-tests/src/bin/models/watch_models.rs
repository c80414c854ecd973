//! Models of Raft's watched values: a waiter misses neither a change nor the end, and sees the end
//! after the last value.

use loom::future::block_on;
use loom::thread;

use crate::watch::{WatchClosedError, WatchSender};
use crate::{ModelRun, explore};

pub(crate) const ALL: &[ModelRun] = &[
    (
        "watch: the last value is seen before the end",
        last_before_the_end,
    ),
    ("watch: who waits for a value is woken by it", woken),
    ("watch: the end comes with the last sender", the_last_of_two),
];

fn last_before_the_end() {
    explore(|| {
        let sender = WatchSender::new(0);
        let mut receiver = sender.subscribe();
        let other = thread::spawn(move || {
            sender.send_replace(1);
        });
        block_on(async {
            let mut seen = 0;
            while receiver.changed().await.is_ok() {
                seen = *receiver.borrow();
            }
            assert_eq!(seen, 1);
        });
        other.join().expect("the other does not panic");
    });
}

fn woken() {
    explore(|| {
        let sender = WatchSender::new(0);
        let waiters = [1, 2].map(|wanted| {
            let mut receiver = sender.subscribe();
            thread::spawn(move || {
                block_on(async {
                    let seen = receiver.wait_for(|value| *value >= wanted).await;
                    assert!(seen.is_ok_and(|seen| *seen >= wanted));
                });
            })
        });
        sender.send_replace(1);
        sender.send_modify(|value| *value += 1);
        for waiter in waiters {
            waiter.join().expect("the other does not panic");
        }
    });
}

fn the_last_of_two() {
    explore(|| {
        let sender = WatchSender::new(0);
        let mut receiver = sender.subscribe();
        let others = [sender.clone(), sender].map(|sender| thread::spawn(move || drop(sender)));
        block_on(async { assert_eq!(receiver.changed().await, Err(WatchClosedError)) });
        for other in others {
            other.join().expect("the other does not panic");
        }
    });
}
