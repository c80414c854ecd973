//! Tests that measurements of attempts become prices and a verdict on predictions in the state.

use super::*;
use crate::engines::backends::AnswerForm;

impl Bench {
    /// Queues all samples, due or not, and applies them.
    fn tell(&self) {
        self.router
            .dispatcher()
            .queue_samples(Instant::now() + Duration::from_secs(60));
        self.flush();
    }

    fn served(&self, slot: u16) -> state::service::BackendServiceView {
        *self.router.view.service().get(Slot(slot)).unwrap()
    }
}

#[test]
fn cached_tokens_of_a_prompt_with_several_answers_are_not_believed() {
    for (n, expected) in [(1, [1, 99, 1]), (2, [100, 0, 1])] {
        let bench = Bench::new(1);
        let question = json!({"model": "m", "prompt": "a".repeat(400), "n": n});
        let identity = bench
            .router
            .reader()
            .identify(&body("/v1/completions", &question));
        let (_, mut attempt) = bench.start(&identity);
        attempt.set_response_form(AnswerForm::of("/v1/completions", false));
        attempt.usage(usage(100, Some(99), 1), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
        assert_eq!(bench.charged(), expected, "{n}");
    }
}

#[test]
fn only_streams_teach_prices() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(1000));
    for _ in 0..10 {
        let (_, mut attempt) = bench.start(&identity);
        attempt.first_byte(Instant::now());
        attempt.usage(usage(250, Some(0), 40), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
    }
    bench.tell();
    let served = bench.served(0);
    let prices = served.learnt.map(|learnt| learnt.first_tokens);
    assert!(matches!(prices, None | Some(0)), "{served:?}");
    for _ in 0..40 {
        let (_, mut attempt) = bench.start(&identity);
        attempt.first_byte(Instant::now());
        attempt.first_token(Instant::now());
        attempt.first_token(Instant::now());
        for tokens in [1, 40, 80] {
            attempt.usage(usage(250, Some(0), tokens), Instant::now());
        }
        attempt.end(AttemptEnd::Finished, Instant::now());
        bench.tell();
    }
    let learnt = bench.served(0).learnt.unwrap();
    assert_eq!(learnt.first_tokens, 40);
    assert!(learnt.gaps > 0);
    let explained = bench.explain(&ask(&identity, &[]));
    assert_eq!(explained.backends[0].prices, learnt.trusted());
    assert!(explained.backends[0].prices.is_some());
    bench.admin(Command::PutRouting(state::policy::RoutingSettings {
        learn: false,
        ..Default::default()
    }));
    let explained = bench.explain(&ask(&identity, &[]));
    assert_eq!(explained.backends[0].prices, None);
    bench.assert_quiet();
}

#[test]
fn predictions_are_compared_with_engine_reports() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(16 * 4096));
    for _ in 0..4 {
        let (decision, mut attempt) = bench.start(&identity);
        let predicted = u64::from(decision.matched) * 4;
        attempt.first_byte(Instant::now());
        // The engine has cached nothing of what is believed to be cached.
        attempt.usage(usage(16_384, Some(0), 1), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
        bench.tell();
        let accuracy = bench.served(0).accuracy.unwrap();
        assert!(accuracy.predicted_tokens >= predicted);
    }
    let accuracy = bench.served(0).accuracy.unwrap();
    assert!(accuracy.is_off, "{accuracy:?}");
    assert_eq!(accuracy.cached_tokens, 0);
    assert_eq!(
        accuracy.correction_permille, 1000,
        "its capacity is unknown"
    );
}

#[test]
fn a_sample_waits_until_it_is_large_enough() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    let finish = |excluded: &[Slot]| {
        let decision = bench.decide(&identity, excluded).unwrap();
        let asked = ask(&identity, excluded);
        let mut attempt = bench.dispatch(&decision, &asked);
        attempt.usage(usage(3, Some(0), 2), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
    };
    for _ in 0..7 {
        finish(&[Slot(1)]);
    }
    finish(&[Slot(0)]);
    let now = Instant::now();
    assert!(bench.router.dispatcher().samples.take(now).is_empty());
    finish(&[Slot(1)]);
    let taken = bench.router.dispatcher().samples.take(now);
    assert_eq!(taken.len(), 1);
    let (sample, _) = &taken[0];
    assert_eq!((sample.ended, sample.prompt_tokens), (8, 24));
    assert_eq!((sample.added_tokens, sample.added_squared), (8 * 5, 8 * 25));
    let later = now + Duration::from_secs(6);
    assert_eq!(
        bench.router.dispatcher().samples.take(later).len(),
        1,
        "however few"
    );
}

#[test]
fn prediction_outcomes_are_reported_beside_sums() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(4000));
    for _ in 0..8 {
        let (_, mut attempt) = bench.start(&identity);
        attempt.usage(usage(1000, Some(0), 2), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
        bench.flush();
    }
    // Predictions of a single user wait.
    let dispatcher = bench.router.dispatcher();
    dispatcher.queue_samples(Instant::now() + Duration::from_secs(120));
    assert_eq!(bench.router.outbox().status().queued_items, 2);
    bench.flush();
    bench.assert_quiet();
}

#[test]
fn sampled_touches_are_sent_to_the_log() {
    let bench = Bench::new(1);
    let sampled = state::policy::VllmCacheAwareSettings {
        touch: state::policy::Touch::Sampled,
        ..Default::default()
    };
    bench.admin(Command::PutPolicy(PolicyConfig::VllmCacheAware(sampled)));
    let identity = bench.identify(&"a".repeat(160));
    let is_touching = |_| {
        let (_, attempt) = bench.start(&identity);
        let is_touching = attempt.open.as_ref().unwrap().is_touching;
        attempt.end(AttemptEnd::Finished, Instant::now());
        is_touching
    };
    let touching = (0..400).map(is_touching).filter(|it| *it).count();
    assert!((20..90).contains(&touching), "{touching} of 400");
    bench.assert_quiet();
}

#[test]
fn bytes_per_token_are_learned_through_the_log() {
    let bench = Bench::new(1);
    for _ in 0..50 {
        let identity = bench.identify(&"a".repeat(2000));
        let (_, mut attempt) = bench.start(&identity);
        attempt.usage(usage(1000, Some(0), 1), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
    }
    let before = bench.identify(&"a".repeat(2000)).tokens;
    assert_eq!(before, 500, "nothing is learnt past the log");
    bench.router.dispatcher().queue_text_samples();
    bench.flush();
    let after = bench.identify(&"a".repeat(2000));
    assert!((900..1000).contains(&after.tokens), "{}", after.tokens);
    assert_eq!(after.tail.tokens_per_block, 8);
    let of_capacity = bench.router.reader().tokens_per_block("m");
    assert!((7.2..8.0).contains(&of_capacity), "{of_capacity}");
    bench.assert_quiet();
}

#[test]
fn changing_cache_reports_do_not_lengthen_the_prompt() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(400));
    let (_, mut attempt) = bench.start(&identity);
    attempt.usage(usage(100, Some(0), 1), Instant::now());
    attempt.usage(usage(100, Some(60), 1), Instant::now());
    attempt.usage(usage(110, Some(60), 1), Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    assert_eq!(bench.charged(), [100, 10, 1]);
}
