//! Tests that the accounting is empty and correct at the end of random sequences of requests.

use super::*;

#[derive(Debug, Clone)]
struct Story {
    prompt: usize,
    shared: bool,
    output: usize,
    reported: Option<(u64, Option<u64>, u64)>,
    end: Option<AttemptEnd>,
    flush: bool,
}

fn story() -> impl Strategy<Value = Story> {
    let end = prop_oneof![
        Just(None),
        Just(Some(AttemptEnd::Finished)),
        Just(Some(AttemptEnd::Broken)),
        Just(Some(AttemptEnd::ClientLeft)),
        Just(Some(AttemptEnd::NotRun)),
        Just(Some(AttemptEnd::Failed)),
    ];
    let reported = proptest::option::of((0_u64..500, proptest::option::of(0_u64..600), 0_u64..200));
    (
        0_usize..300,
        any::<bool>(),
        0_usize..100,
        reported,
        end,
        any::<bool>(),
    )
        .prop_map(|(prompt, shared, output, reported, end, flush)| Story {
            prompt,
            shared,
            output,
            reported,
            end,
            flush,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_counts_return_to_zero_however_attempts_end(
        stories in proptest::collection::vec(story(), 1..20)
    ) {
        let bench = Bench::new(3);
        let mut held = Vec::new();
        for (at, story) in stories.iter().enumerate() {
            let mut text = "s".repeat(story.prompt);
            if !story.shared {
                text.insert_str(0, &at.to_string());
            }
            let identity = bench.identify(&text);
            let (_, mut attempt) = bench.start(&identity);
            attempt.output(&"o".repeat(story.output), Instant::now());
            if let Some((prompt, cached, made)) = story.reported {
                attempt.first_byte(Instant::now());
                attempt.usage(usage(prompt, cached, made), Instant::now());
            }
            if story.flush {
                bench.flush();
            }
            match story.end {
                Some(end) => attempt.end(end, Instant::now()),
                None => held.push(attempt),
            }
        }
        drop(held);
        bench.assert_quiet();
    }
}
