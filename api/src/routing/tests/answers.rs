//! Tests which blocks an answer adds to those of its prompt, for models with a tokenizer.

use state::command::Item;
use state::kv_events::{KvBatch, KvUpdate};

use super::super::fixture::router_with;
use super::tokens::{CHAT, chat, fixture, read, settings};
use super::*;
use crate::prompt::{ReadRequest, ReplyJoin};

const QUESTION: &str = "How are you?";
const REPLY: &str = "I am well, thank you; and how are you yourself on this fine day?";

/// A conversation at one engine, with blocks of four tokens.
struct Conversation {
    bench: Bench,
    question: ReadRequest,
    /// Number of tokens of [`REPLY`].
    reply_tokens: u64,
}

impl Conversation {
    fn start() -> Self {
        let port = Port::new(Log::new(&[None]));
        let model = settings(fixture("chatml"));
        let router = router_with(&port, OutboxSettings::default(), model);
        let bench = Bench { port, router };
        let question = run(read(&bench, CHAT, &chat(&[("user", QUESTION)])));
        let Some(ReplyJoin::Local(seam)) = &question.identity.tail.seam else {
            panic!("{question:?}");
        };
        let reply_tokens = seam.continuation(REPLY, true).unwrap().len() as u64;
        Self {
            bench,
            question,
            reply_tokens,
        }
    }

    /// Answers the question with what `answers` records. Returns the number of blocks of `next` that
    /// are believed to be cached.
    fn matched_after(
        &self,
        answers: impl FnOnce(&mut Attempt),
        (path, body): (&str, &Value),
    ) -> u64 {
        let (_, mut attempt) = self.bench.start(&self.question.identity);
        answers(&mut attempt);
        attempt.end(AttemptEnd::Finished, Instant::now());
        self.bench.flush();
        let next = run(read(&self.bench, path, body));
        self.bench
            .decide(&next.identity, &[])
            .unwrap()
            .matched
            .into()
    }

    /// Answers the question with [`REPLY`], of which the engine reports `made` tokens. Returns the
    /// number of blocks of the next turn that are believed to be cached.
    fn matched_after_text(&self, made: u64) -> u64 {
        let answers = |attempt: &mut Attempt| {
            attempt.output(REPLY, Instant::now());
            attempt.usage(usage(0, None, made), Instant::now());
        };
        let turns = [("user", QUESTION), ("assistant", REPLY), ("user", "Well.")];
        self.matched_after(answers, (CHAT, &chat(&turns)))
    }

    /// Returns the number of blocks that are believed to be in the engine's cache.
    fn owned(&self) -> u64 {
        let log = self.bench.port.log.lock().unwrap();
        log.state.view().blocks.owned(Slot(0)).into()
    }

    /// Returns the number of blocks that an engine has computed after an answer of `made` tokens.
    fn blocks_after(&self, made: u64) -> u64 {
        // The last token has not been computed.
        (self.question.ids.len() as u64 + made.saturating_sub(1)) / 4
    }
}

fn run<T>(reading: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(reading)
}

#[test]
fn an_answer_whose_text_has_other_tokens_adds_blocks_that_match_nothing() {
    for difference in -3..=4 {
        let it = Conversation::start();
        let made = it.reply_tokens.saturating_add_signed(difference);
        let expected = match difference {
            // The engine also reports the token that ended the response, if one did.
            0 | 1 => it.blocks_after(made),
            _ => it.blocks_after(0),
        };
        assert_eq!(it.matched_after_text(made), expected, "{difference}");
        assert_eq!(it.owned(), it.blocks_after(made), "{difference}");
    }
}

#[test]
fn an_answer_that_is_no_text_adds_no_blocks() {
    let it = Conversation::start();
    let answers = |attempt: &mut Attempt| {
        attempt.other_output(30, Instant::now());
        attempt.usage(usage(0, None, 30), Instant::now());
    };
    let turns = [
        ("user", QUESTION),
        ("assistant", "Let me see."),
        ("user", "Well."),
    ];
    let matched = it.matched_after(answers, (CHAT, &chat(&turns)));
    assert_eq!(
        (matched, it.owned()),
        (it.blocks_after(0), it.blocks_after(0))
    );
}

#[test]
fn an_exactly_followed_engine_gets_no_blocks_of_answers() {
    for is_followed in [false, true] {
        let it = Conversation::start();
        let backend = it.bench.port.log.lock().unwrap().handle(0);
        for news in [KvUpdate::Begin, KvUpdate::Current { seq: None }] {
            let batch = KvBatch {
                backend,
                rank: 0,
                publisher: 1,
                news,
            };
            let outbox = &it.bench.router.dispatcher().outbox;
            assert!(!is_followed || outbox.note(Item::KvEvents(batch)));
        }
        it.bench.flush();
        let made = it.reply_tokens + 1;
        let expected = it.blocks_after(if is_followed { 0 } else { made });
        assert_eq!(it.matched_after_text(made), expected, "{is_followed}");
    }
}

#[test]
fn an_answer_with_token_ids_adds_their_blocks() {
    // No tokenizer makes these ids of the text.
    let ids: Vec<u32> = (0..40).collect();
    for (parts, made, is_whole) in [
        (&[&ids[..]][..], 40, true),
        (&[&ids[..1], &ids[1..17], &ids[17..]], 40, true),
        (&[&ids[..1], &ids[17..]], 40, false),
        (&[&ids[..39]], 40, false),
    ] {
        let it = Conversation::start();
        let answers = |attempt: &mut Attempt| {
            for part in parts {
                attempt.output("text ", Instant::now());
                // Reasoning is among the ids.
                attempt.other_output(1, Instant::now());
                attempt.output_ids(part);
            }
            attempt.usage(usage(0, None, made), Instant::now());
        };
        let prompt = [&it.question.ids[..], &ids, &[1; 8]].concat();
        let next = json!({"model": "m", "prompt": prompt});
        let matched = it.matched_after(answers, ("/v1/completions", &next));
        let expected = it.blocks_after(if is_whole { made } else { 0 });
        assert_eq!(matched, expected, "{parts:?}");
    }
}

#[test]
fn token_ids_continue_a_prompt_of_ids() {
    let mut it = Conversation::start();
    let prompt = |ids: &[u32]| json!({"model": "m", "prompt": ids});
    let (first, answer): (Vec<u32>, Vec<u32>) = ((1..10).collect(), (20..40).collect());
    it.question = run(read(&it.bench, "/v1/completions", &prompt(&first)));
    let answers = |attempt: &mut Attempt| {
        attempt.output("text", Instant::now());
        attempt.output_ids(&answer);
        attempt.usage(usage(0, None, 20), Instant::now());
    };
    let next = prompt(&[&first[..], &answer, &[1; 8]].concat());
    let matched = it.matched_after(answers, ("/v1/completions", &next));
    assert_eq!(matched, (9 + 19) / 4);
}
