//! The output of the emulated model, which goes on where an earlier output was cut off.
//!
//! The output is made of four-byte words, one per token, drawn from `(engine seed, prompt,
//! position)`. As with a deterministic model, what follows a prompt and the first words of its
//! output is the rest of that output: a prompt that ends with such words is read as the shorter
//! prompt and the words. If several shorter prompts fit, the shortest counts. So it makes no
//! difference where, and how often, an output was cut off.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of bytes per token.
pub const TOKEN_BYTES: usize = 4;
/// Maximum number of words at the end of a prompt that are read as output: as many as a router
/// keeps of a stream by default.
const CONTINUED_WORDS_MAX: usize = 65_536;
/// Number of words of an output that no limit cuts. An output that goes on after its end has as many
/// again.
const STOP_WORDS: u32 = 16;
/// Number of bytes per link of the chain of hashes that gives all prefixes of a prompt a seed.
const LINK_BYTES: usize = 128;

/// The words that follow a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    seed: u64,
    /// Number of words at the prompt's end.
    begun: u32,
    /// Whether the prompt lacks the space after its last word.
    is_space_due: bool,
}

impl Output {
    /// Returns the whole output of `prompt`. `seed` is the engine's.
    #[must_use]
    pub fn of(prompt: &[u8], seed: u64) -> Self {
        Self::begun(PrefixSeeds::new(prompt, seed).up_to(prompt.len()), 0, false)
    }

    /// Returns the output of `prompt`, whose end may be the first words of an output. If the last
    /// of these words lacks its space, the space is appended to the prompt and begins the output.
    #[must_use]
    pub fn after(prompt: &mut Vec<u8>, seed: u64) -> Self {
        let is_space_due = prompt.last().is_some_and(u8::is_ascii_lowercase);
        if is_space_due {
            prompt.push(b' ');
        }
        if let Some((seed, words)) = find_beginning(prompt, seed) {
            return Self::begun(seed, words, is_space_due);
        }
        if is_space_due {
            prompt.pop();
        }
        Self::of(prompt, seed)
    }

    fn begun(seed: u64, begun: u32, is_space_due: bool) -> Self {
        Self {
            seed,
            begun,
            is_space_due,
        }
    }

    /// Returns the seed of the words.
    #[must_use]
    pub fn seed(self) -> u64 {
        self.seed
    }

    /// Returns the number of words after the prompt until the model ends the output by itself.
    #[must_use]
    pub fn words_to_stop(self) -> u32 {
        STOP_WORDS - self.begun % STOP_WORDS
    }

    /// Returns the word at `position` after the prompt.
    #[must_use]
    pub fn word(self, position: u32) -> [u8; TOKEN_BYTES] {
        word(self.seed, self.begun + position)
    }

    /// Returns the text of the words at the positions `from..to` after the prompt.
    #[must_use]
    pub fn text(self, from: u32, to: u32) -> String {
        let words = words(self.seed, self.begun + from, self.begun + to);
        match self.is_space_due && from == 0 && to > 0 {
            true => format!(" {words}"),
            false => words,
        }
    }
}

/// Returns the output word at `position`: three letters and a space.
#[must_use]
pub fn word(output_seed: u64, position: u32) -> [u8; TOKEN_BYTES] {
    let draw = xxh3_64_with_seed(&position.to_le_bytes(), output_seed);
    let letter = |shift: u32| b'a' + u8::try_from((draw >> shift) % 26).expect("less than 26");
    [letter(0), letter(16), letter(32), b' ']
}

/// Returns the output words at the positions `from..to` as text.
#[must_use]
pub fn words(output_seed: u64, from: u32, to: u32) -> String {
    (from..to)
        .flat_map(|position| word(output_seed, position))
        .map(char::from)
        .collect()
}

/// Returns the seed of the output whose first words `text` ends with, and their number.
fn find_beginning(text: &[u8], seed: u64) -> Option<(u64, u32)> {
    let is_word = |bytes: &&[u8]| matches!(bytes, [letters @ .., b' '] if letters.iter().all(u8::is_ascii_lowercase));
    // A prompt is never empty.
    let most = (text.len().saturating_sub(1) / TOKEN_BYTES).min(CONTINUED_WORDS_MAX);
    let ending = text.rchunks_exact(TOKEN_BYTES).take(most);
    let count = ending.take_while(is_word).count();
    let mut seeds = PrefixSeeds::new(text, seed);
    (1..=count).rev().find_map(|count| {
        let start = text.len() - count * TOKEN_BYTES;
        let output_seed = seeds.up_to(start);
        let mut found = (0..).zip(text[start..].chunks_exact(TOKEN_BYTES));
        let is_found = found.all(|(position, bytes)| *bytes == word(output_seed, position));
        is_found.then(|| (output_seed, u32::try_from(count).unwrap_or(u32::MAX)))
    })
}

/// Seeds of the outputs that follow the prefixes of a text, from short to long.
#[derive(Debug)]
struct PrefixSeeds<'a> {
    text: &'a [u8],
    /// Number of bytes whose hashes are chained.
    chained: usize,
    chain: u64,
}

impl<'a> PrefixSeeds<'a> {
    fn new(text: &'a [u8], seed: u64) -> Self {
        Self {
            text,
            chained: 0,
            chain: seed,
        }
    }

    /// Returns the seed of the prefix of `length` bytes, which is not shorter than the last one.
    fn up_to(&mut self, length: usize) -> u64 {
        while self.chained + LINK_BYTES <= length {
            let link = &self.text[self.chained..self.chained + LINK_BYTES];
            self.chain = xxh3_64_with_seed(link, self.chain);
            self.chained += LINK_BYTES;
        }
        xxh3_64_with_seed(&self.text[self.chained..length], self.chain)
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::{Sequence, token_count};
    use super::*;
    use proptest::prelude::*;

    const SEED: u64 = 7;

    fn sequence(prompt: &mut Vec<u8>) -> Sequence {
        let output = Output::after(prompt, SEED);
        Sequence::new(prompt, "", 4, SEED).with_output(output)
    }

    /// Returns the sequence of `prompt` after `tokens` output tokens, and the text of these.
    fn run(prompt: &[u8], tokens: u32) -> (Sequence, String) {
        let mut sequence = sequence(&mut prompt.to_vec());
        for _ in 0..tokens {
            sequence.push_token();
        }
        let text = sequence.output().text(0, tokens);
        (sequence, text)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn an_output_cut_off_twice_equals_the_undisturbed_one(
            prompt in "[ -~]{0,9}([a-z]{3} ){0,60}[a-z ]{1,5}",
            cuts in (1_u32..50, 1_u32..50),
            is_trimmed in any::<(bool, bool)>(),
        ) {
            let all = cuts.0 + cuts.1 + 9;
            let (whole, text) = run(prompt.as_bytes(), all);
            let mut received = String::new();
            let mut counted = 0;
            for (cut, is_trimmed) in [(cuts.0, is_trimmed.0), (cuts.1, is_trimmed.1)] {
                counted += cut;
                received = text[..received_bytes(&text, counted)].to_owned();
                if is_trimmed {
                    received.truncate(received.trim_end().len());
                }
                let (rest, more) = run(format!("{prompt}{received}").as_bytes(), all - counted);
                prop_assert_eq!(format!("{received}{more}"), text.as_str());
                prop_assert_eq!(rest.prompt_tokens(), whole.prompt_tokens() + counted);
                prop_assert_eq!(rest.hashes(), whole.hashes());
            }
            prop_assert!(!received.is_empty());
        }
    }

    /// Returns the length of the first `words` words of `text`, which may begin with a space.
    fn received_bytes(text: &str, words: u32) -> usize {
        usize::from(text.starts_with(' ')) + words as usize * TOKEN_BYTES
    }

    #[test]
    fn a_prompt_without_output_has_an_output_of_its_own() {
        for prompt in ["a", "abc ", "tell me", "abc def ghi ", "<|assistant|>\n"] {
            let mut bytes = prompt.as_bytes().to_vec();
            assert_eq!(Output::after(&mut bytes, SEED), Output::of(&bytes, SEED));
            assert_eq!(bytes, prompt.as_bytes());
        }
    }

    #[test]
    fn words_of_another_seed_or_after_a_gap_are_not_continued() {
        let output = Output::of(b"hello", SEED);
        for end in [output.text(1, 4), Output::of(b"hello", 8).text(0, 4)] {
            let mut prompt = format!("hello{end}").into_bytes();
            assert_eq!(Output::after(&mut prompt, SEED).begun, 0);
        }
    }

    #[test]
    fn a_long_output_is_continued_up_to_the_maximum() {
        let output = Output::of(b"hello", SEED);
        let most = u32::try_from(CONTINUED_WORDS_MAX).unwrap();
        for (words, expected) in [(most, most), (most + 1, 0)] {
            let mut prompt = format!("hello{}", output.text(0, words)).into_bytes();
            let tokens = token_count(prompt.len());
            let found = Output::after(&mut prompt, SEED);
            assert_eq!(found.begun, expected);
            assert_eq!(found.word(0) == output.word(words), expected > 0);
            assert_eq!(tokens, 2 + words);
        }
    }

    #[test]
    fn prefixes_have_the_seeds_of_equal_prompts() {
        let text: Vec<u8> = (0..=255).cycle().take(600).collect();
        let mut seeds = PrefixSeeds::new(&text, SEED);
        let all: Vec<u64> = (0..=600).map(|length| seeds.up_to(length)).collect();
        for (length, seed) in all.iter().enumerate() {
            assert_eq!(*seed, Output::of(&text[..length], SEED).seed());
        }
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
