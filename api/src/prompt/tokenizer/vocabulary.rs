//! Vocabularies compressed into the binary, at a third of their size as text (docs/adr/0047).
//!
//! A file contains all tokens in id order, each preceded by its length in one byte, compressed with
//! gzip. The files are generated from `tiktoken-rs`, and a test compares them: `UPDATE_GENERATED=1
//! cargo test -p api vocabular` regenerates them.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::io::Read as _;
use std::sync::OnceLock;

use flate2::read::GzDecoder;
use tiktoken_rs::{
    CoreBPE, ENDOFPROMPT, ENDOFTEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, O200K_BASE_PAT_STR, Rank,
};

/// Pattern by which `cl100k_base` splits text before tokenizing. `tiktoken-rs` does not export it.
const CL100K_BASE_PAT_STR: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+",
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
);

/// A vocabulary in the binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vocabulary {
    /// `cl100k_base`, of GPT-4.
    Cl100k,
    /// `o200k_base`, of GPT-4o.
    O200k,
}

impl Vocabulary {
    /// Returns the tokenizer with this vocabulary, which is created at the first call and cached.
    pub(super) fn tokenizer(self) -> &'static CoreBPE {
        static MADE: [OnceLock<CoreBPE>; 2] = [const { OnceLock::new() }; 2];
        MADE[self as usize].get_or_init(|| self.make())
    }

    fn make(self) -> CoreBPE {
        let (pattern, special): (_, &[(&str, Rank)]) = match self {
            Self::Cl100k => (
                CL100K_BASE_PAT_STR,
                &[
                    (ENDOFTEXT, 100_257),
                    (FIM_PREFIX, 100_258),
                    (FIM_MIDDLE, 100_259),
                    (FIM_SUFFIX, 100_260),
                    (ENDOFPROMPT, 100_276),
                ],
            ),
            Self::O200k => (
                O200K_BASE_PAT_STR,
                &[(ENDOFTEXT, 199_999), (ENDOFPROMPT, 200_018)],
            ),
        };
        let special = special.iter().map(|(text, id)| ((*text).to_owned(), *id));
        let made = CoreBPE::new(tokens(&self.unpacked()), special.collect(), pattern);
        made.expect("a test makes it of the same bytes")
    }

    /// Returns the decompressed file: all tokens in id order, each preceded by its length.
    fn unpacked(self) -> Vec<u8> {
        let packed: &[u8] = match self {
            Self::Cl100k => include_bytes!("vocabularies/cl100k_base.gz"),
            Self::O200k => include_bytes!("vocabularies/o200k_base.gz"),
        };
        let mut bytes = Vec::new();
        let read = GzDecoder::new(packed).read_to_end(&mut bytes);
        read.expect("a test reads the same bytes");
        bytes
    }
}

/// Returns the ids of the tokens in a decompressed file.
fn tokens<S: BuildHasher + Default>(mut bytes: &[u8]) -> HashMap<Vec<u8>, Rank, S> {
    let mut ids = HashMap::default();
    let mut id = 0;
    while let Some((length, rest)) = bytes.split_first() {
        let (token, rest) = rest.split_at(usize::from(*length));
        ids.insert(token.to_vec(), id);
        id += 1;
        bytes = rest;
    }
    ids
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::path::Path;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed_again(theirs: &CoreBPE) -> Vec<u8> {
        let mut bytes = Vec::new();
        for id in 0.. {
            let Ok(token) = theirs.decode_bytes(&[id]) else {
                break;
            };
            bytes.push(u8::try_from(token.len()).unwrap());
            bytes.extend(token);
        }
        bytes
    }

    #[test]
    fn vocabularies_match_tiktoken_rs() {
        for (name, ours, theirs, count) in [
            (
                "cl100k_base",
                Vocabulary::Cl100k,
                tiktoken_rs::cl100k_base(),
                100_256,
            ),
            (
                "o200k_base",
                Vocabulary::O200k,
                tiktoken_rs::o200k_base(),
                199_998,
            ),
        ] {
            let theirs = theirs.unwrap();
            let fresh = packed_again(&theirs);
            if std::env::var_os("UPDATE_GENERATED").is_some() {
                let file = format!("src/prompt/tokenizer/vocabularies/{name}.gz");
                let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
                let out = std::fs::File::create(file).unwrap();
                let mut out = GzEncoder::new(out, Compression::best());
                out.write_all(&fresh).unwrap();
                out.finish().unwrap();
                continue;
            }
            let found: HashMap<_, _, std::hash::RandomState> = tokens(&fresh);
            assert_eq!(found.len(), count, "{name}");
            assert!(
                ours.unpacked() == fresh,
                "{name}.gz is not what the crate has: UPDATE_GENERATED=1 cargo test -p api vocabular"
            );
            let ours = ours.tokenizer();
            assert_eq!(ours.special_tokens(), theirs.special_tokens());
            for text in [
                "It's  12345 Zürich's\r\n\r\n\tfn main() {}  ",
                "HE'LL say: déjà-vu (数千年) \u{1F980}\u{301} x\u{a0}\n  \n y",
                "<|endoftext|>a<|fim_prefix|>b<|fim_middle|><|fim_suffix|><|endofprompt|>",
            ] {
                assert_eq!(ours.encode_ordinary(text), theirs.encode_ordinary(text));
                let with = |of: &CoreBPE| of.encode_with_special_tokens(text);
                assert_eq!(with(ours), with(&theirs), "{name}");
            }
        }
    }
}
