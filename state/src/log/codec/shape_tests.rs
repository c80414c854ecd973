//! Proves that no change of what commands can contain goes unnoticed.
//!
//! An earlier build stops at a variant that it does not know, however deep inside a command: a
//! policy, an order, a kind of item. The tests therefore explore the decoder itself. Starting with
//! zeros, they vary one byte after another and keep every input that decodes to a name that no
//! earlier input led to, until they have seen each variant and each field once.
//! `state/tests/golden/format-N.txt` records what format N added. ADR 0004 describes the rules.

use std::collections::BTreeSet;
use std::fmt::Debug;

use super::*;

/// Newest format that a release contains; 0 before the first release. Its record is fixed.
const FORMAT_RELEASED: u8 = 0;
/// What each format added, in ascending order from format 1.
const RECORDS: [&str; 1] = [include_str!("../../../tests/golden/format-1.txt")];
/// Number of zeros that follow the varied bytes: more than a command needs.
const ZEROS: usize = 512;

/// An input that decodes to names that no earlier input led to.
struct Sample<T> {
    value: T,
    /// Encoded value, then zeros.
    bytes: Vec<u8>,
    /// Length of the encoded value.
    length: usize,
    names: Vec<String>,
}

impl<T: Decode<()> + Debug> Sample<T> {
    fn read(bytes: Vec<u8>) -> Option<Self> {
        let config = bincode::config::standard().with_limit::<DECODE_BYTES_MAX>();
        let (value, length) = bincode::decode_from_slice(&bytes, config).ok()?;
        let names = names(&format!("{value:?}"));
        Some(Self {
            value,
            bytes,
            length,
            names,
        })
    }

    fn with(&self, at: usize, byte: u8) -> Option<Self> {
        let mut bytes = vec![0; at + 1 + ZEROS];
        bytes[..at].copy_from_slice(&self.bytes[..at]);
        bytes[at] = byte;
        Self::read(bytes)
    }

    /// Whether the byte at `at` is part of a number or a length, which leads to no other names.
    fn is_number(&self, at: usize) -> bool {
        let is_same = |byte| {
            self.with(at, byte)
                .is_some_and(|other| other.names == self.names)
        };
        [1, 2, 240].into_iter().all(is_same)
    }

    /// Returns the length, the bytes up to the last that is not 0, and the new names.
    fn line(&self, names: &[String]) -> String {
        let bytes = &self.bytes[..self.length];
        let end = bytes.iter().rposition(|byte| *byte != 0);
        let varied = &bytes[..end.map_or(0, |at| at + 1)];
        format!("{} {} {}", self.length, tests::hex(varied), names.join(" "))
    }
}

/// Splits `debug` into words and punctuation, without strings.
fn tokens(debug: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = debug.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |char: char| char.is_alphanumeric() || char == '_';
        let length = match first {
            '"' => string_bytes(rest),
            _ if is_word(first) => rest.find(|char| !is_word(char)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        if first != '"' {
            tokens.push(&rest[..length]);
        }
        rest = rest[length..].trim_start();
    }
    tokens
}

/// Returns the length of the string literal at the start of `debug`, in bytes.
fn string_bytes(debug: &str) -> usize {
    let mut chars = debug.char_indices().skip(1);
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => drop(chars.next()),
            '"' => return at + 1,
            _ => {}
        }
    }
    debug.len()
}

/// Returns the names in `debug`, each behind those that contain it, in order: types, variants,
/// fields, and `[]` for elements.
fn names(debug: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut around: Vec<String> = Vec::new();
    let (mut field, mut open) = (String::new(), String::new());
    let tokens = tokens(debug);
    for (at, token) in tokens.iter().enumerate() {
        let next = tokens.get(at + 1).copied().unwrap_or_default();
        let mut note = |name: &str| {
            let path = around.iter().map(String::as_str).chain([name]);
            names.push(path.collect::<Vec<_>>().join("/"));
        };
        match *token {
            "(" | "{" => around.push(std::mem::take(&mut open)),
            "[" => {
                let element = format!("{}[]", std::mem::take(&mut field));
                if next != "]" {
                    note(&element);
                }
                around.push(element);
            }
            ")" | "}" | "]" => drop(around.pop()),
            "," => field.clear(),
            word if word.starts_with(char::is_alphabetic) && next == ":" => {
                note(word);
                field = format!("{word}=");
            }
            // Hashes are shown as numbers in hexadecimal digits.
            word if word.starts_with(char::is_uppercase) || ["true", "false"].contains(&word) => {
                let name = std::mem::take(&mut field) + word;
                note(&name);
                open = name;
            }
            _ => {}
        }
    }
    names
}

/// Returns the samples of `T` with a line for each.
fn explore<T: Decode<()> + Debug>() -> Vec<(T, String)> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    let first = Sample::read(vec![0; ZEROS]).expect("zeros are a value");
    let mut open: Vec<(Sample<T>, usize)> = vec![(first, 0)];
    while let Some((sample, from)) = open.pop() {
        let new = |name: &&String| !seen.contains(*name);
        let names: Vec<String> = sample.names.iter().filter(new).cloned().collect();
        if names.is_empty() {
            continue;
        }
        let line = sample.line(&names);
        seen.extend(names);
        let mut others = Vec::new();
        for at in (from..sample.length).filter(|at| !sample.is_number(*at)) {
            let varied = (1..=u8::MAX).filter_map(|byte| Some((sample.with(at, byte)?, at + 1)));
            others.extend(varied);
        }
        open.extend(others.into_iter().rev());
        found.push((sample.value, line));
    }
    found
}

/// Compares explored lines, each with the format of its command, with the records. An error says
/// what to do.
fn judge(explored: &[(u8, String)], records: &[&str], is_rehearsal: bool) -> Result<(), String> {
    let newest = records.len();
    for (format, record) in (1_u8..).zip(records) {
        let is_there = |line: &&str| explored.iter().any(|(_, other)| other == line);
        if let Some(line) = record.lines().find(|line| !is_there(line)) {
            return Err(format!(
                "format {format} contains {line:?}, which is now decoded otherwise. If format \
                 {format} was released, add a new variant or command instead"
            ));
        }
    }
    for (format, line) in explored {
        let recorded = records
            .iter()
            .position(|record| record.lines().any(|other| other == line));
        let Some(recorded) = recorded.map(|at| at + 1) else {
            return Err(format!(
                "no format contains {line:?}. Replicas that know format {newest} stop at it. If \
                 format {newest} was released, raise FORMAT_VERSION, let `format_of` return it for \
                 every command that contains this, and add a record to RECORDS"
            ));
        };
        let format = usize::from(*format);
        if format != recorded && !(is_rehearsal && format > recorded) {
            return Err(format!(
                "`format_of` returns {format} for {line:?}, which format {recorded} added"
            ));
        }
    }
    Ok(())
}

#[test]
fn every_change_of_a_command_raises_the_format() {
    let explored: Vec<(u8, String)> = explore::<Envelope>()
        .into_iter()
        .map(|(envelope, line)| (format_of(&envelope.command), line))
        .collect();
    let is_rehearsal = cfg!(feature = "planted");
    let newest = u8::try_from(RECORDS.len()).unwrap();
    assert_eq!(FORMAT_VERSION, newest + u8::from(is_rehearsal));
    let judged = judge(&explored, &RECORDS, is_rehearsal);
    if judged.is_err() && std::env::var_os("UPDATE_EXPECT").is_some() && !is_rehearsal {
        assert!(newest > FORMAT_RELEASED, "format {newest} is released");
        let added = explored.iter().filter(|(format, _)| *format == newest);
        let lines: String = added.map(|(_, line)| format!("{line}\n")).collect();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        std::fs::write(format!("{folder}/format-{newest}.txt"), lines).unwrap();
    }
    judged.unwrap_or_else(|why| panic!("{why}; then run the test with UPDATE_EXPECT=1"));
}

/// A command in three builds: the second appended a variant, the third a field.
mod builds {
    pub(super) mod first {
        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        pub(in super::super) struct Order {
            choices: Vec<Choice>,
            number: u64,
        }

        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        enum Choice {
            Nothing,
            One(Option<u8>),
        }
    }

    pub(super) mod second {
        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        pub(in super::super) struct Order {
            choices: Vec<Choice>,
            number: u64,
        }

        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        enum Choice {
            Nothing,
            One(Option<u8>),
            Some { depth: u8 },
        }
    }

    pub(super) mod third {
        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        pub(in super::super) struct Order {
            choices: Vec<Choice>,
            number: u64,
            is_urgent: bool,
        }

        #[derive(Debug, bincode::Decode)]
        #[expect(dead_code, reason = "only its shape matters")]
        enum Choice {
            Nothing,
            One(Option<u8>),
        }
    }
}

fn lines<T: Decode<()> + Debug>(format: impl Fn(&str) -> u8) -> Vec<(u8, String)> {
    let lines = explore::<T>().into_iter().map(|(_, line)| line);
    lines.map(|line| (format(&line), line)).collect()
}

#[test]
fn exploration_finds_each_variant_and_each_field() {
    let found: Vec<String> = lines::<builds::second::Order>(|_| 1)
        .into_iter()
        .map(|(_, line)| line)
        .collect();
    expect_test::expect![[r#"
        2  Order Order/choices Order/number
        3 01 Order/choices=[] Order/choices=[]/Nothing
        4 0101 Order/choices=[]/One Order/choices=[]/One/None
        5 010101 Order/choices=[]/One/Some
        4 0102 Order/choices=[]/Some Order/choices=[]/Some/depth"#]]
    .assert_eq(&found.join("\n"));
}

#[test]
fn a_change_without_a_new_format_is_refused() {
    let first = lines::<builds::first::Order>(|_| 1);
    let record: String = first.iter().map(|(_, line)| format!("{line}\n")).collect();
    let judge = |explored: &[(u8, String)], records: &[&str]| judge(explored, records, false);
    assert_eq!(judge(&first, &[&record]), Ok(()));
    let same_format = lines::<builds::second::Order>(|_| 1);
    let why = judge(&same_format, &[&record]).unwrap_err();
    assert!(why.starts_with("no format contains"), "{why}");
    let longer = lines::<builds::third::Order>(|_| 1);
    let why = judge(&longer, &[&record]).unwrap_err();
    assert!(why.starts_with("format 1 contains"), "{why}");
    // The record of the second format contains what it added, and `format_of` must return it.
    let of_variant = |line: &str| if line.contains("=[]/Some") { 2 } else { 1 };
    let second = lines::<builds::second::Order>(of_variant);
    let added = second.iter().filter(|(format, _)| *format == 2);
    let added: String = added.map(|(_, line)| format!("{line}\n")).collect();
    assert!(added.contains("depth"), "{added}");
    assert_eq!(judge(&second, &[&record, &added]), Ok(()));
    let why = judge(&same_format, &[&record, &added]).unwrap_err();
    assert!(why.starts_with("`format_of` returns 1 for"), "{why}");
}
