//! Recorded traces: arrival times, lengths, and shared prefixes of requests.
//!
//! The reader supports Quorate's recordings and three formats of others, each a `TraceFormat`. It
//! recognises a format by the first line. Traces state lengths in tokens; here a token is four bytes
//! of text ([`crate::engine::text`]). Traces with block ids (Mooncake: 512 tokens each) get one text
//! per id, so that equal ids give equal text and shared prefixes stay shared. Other traces get a
//! distinct text per request.
//!
//! `scale` multiplies lengths and block size alike, which keeps the structure of shared prefixes. A
//! fraction below 1 reduces the load on the machine.

mod azure;
mod mooncake;
mod recording;
#[cfg(test)]
mod tests;
mod vtc;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::text::PromptSpec;
use crate::engine::text::TOKEN_BYTES;

/// Number of tokens in a block of Mooncake's traces.
const BLOCK_TOKENS: u32 = 512;
/// Maximum number of tokens of a prompt or an output. The reader rejects a line with more.
const TOKENS_MAX: u64 = 1 << 24;

/// Reason why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the read.
        source: std::io::Error,
    },
    /// A line does not match the format.
    #[error("{}:{line}: {message}", path.display())]
    BadLine {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What was expected and what was found.
        message: String,
    },
}

/// A request of a trace, ready to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Time since the start of the trace.
    pub at: Duration,
    /// User who sends the request.
    pub user: Arc<str>,
    /// Session of which the request is a turn, and the one that started it.
    pub session: [Option<String>; 2],
    /// Model that was requested, if known.
    pub model: Option<String>,
    /// Prompt of the request.
    pub prompt: PromptSpec,
    /// Number of output tokens to request.
    pub output_tokens: u32,
}

/// Options for reading a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceOptions {
    /// Factor by which lengths are scaled.
    pub scale: LengthScale,
    /// Time in the trace before which requests are read; `None` to read all.
    pub first: Option<Duration>,
    /// Number of users to whom requests are assigned if the trace names none.
    pub users: u32,
    /// Seed of the prompts' texts.
    pub seed: u64,
    /// Whether the file may be a recording of Quorate's.
    pub takes_recordings: bool,
}

/// A fraction by which lengths are multiplied, such as `1/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthScale {
    numerator: u32,
    denominator: u32,
}

impl LengthScale {
    /// The scale that keeps the recorded lengths.
    pub const ONE: Self = Self {
        numerator: 1,
        denominator: 1,
    };

    /// The scale of most runs on recorded prompts: a sixteenth.
    pub const SIXTEENTH: Self = Self {
        numerator: 1,
        denominator: 16,
    };

    /// Checks that blocks of so many tokens stay whole.
    fn keeps_whole(self, block_tokens: u32) -> Result<(), String> {
        let scaled = u64::from(block_tokens) * u64::from(self.numerator);
        let is_whole = scaled.is_multiple_of(self.denominator.into());
        let expected = || format!("expected a scale that keeps {block_tokens}-token blocks whole");
        is_whole.then_some(()).ok_or_else(expected)
    }

    /// Scales a length, rounded up so that no length becomes 0.
    pub(crate) fn apply(self, tokens: u32) -> u32 {
        let scaled = u64::from(tokens) * u64::from(self.numerator);
        u32::try_from(scaled.div_ceil(u64::from(self.denominator))).unwrap_or(u32::MAX)
    }
}

impl FromStr for LengthScale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (numerator, denominator) = text.split_once('/').unwrap_or((text, "1"));
        let whole = |part: &str| {
            part.trim()
                .parse::<u32>()
                .ok()
                .filter(|n| (1..=4096).contains(n))
        };
        let (Some(numerator), Some(denominator)) = (whole(numerator), whole(denominator)) else {
            return Err("expected a fraction like 1/16, of numbers from 1 to 4096".to_owned());
        };
        let scale = Self {
            numerator,
            denominator,
        };
        scale.keeps_whole(BLOCK_TOKENS).map(|()| scale)
    }
}

/// A record of a trace, before scaling.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TraceRecord {
    /// Time of the request since the format's origin.
    at: Duration,
    user: Option<String>,
    session: [Option<String>; 2],
    model: Option<String>,
    input_tokens: u32,
    output_tokens: u32,
    /// Ids of the prompt's blocks, and the tokens of each but the last; `None` if the format has none.
    blocks: Option<(Vec<u64>, u32)>,
}

/// A file format of traces.
trait TraceFormat: Sync {
    /// Returns whether a file with this first line has this format.
    fn begins_with(&self, first_line: &str) -> bool;
    /// Returns the number of lines before the first record.
    fn heading_lines(&self) -> usize;
    /// Parses a line as a record.
    ///
    /// # Errors
    /// If the line does not match the format, with what was expected and what was found.
    fn read(&self, line: &str) -> Result<TraceRecord, String>;
    /// Returns the interval that timestamps are rounded to; zero if they are exact.
    fn grain(&self) -> Duration {
        Duration::ZERO
    }
}

const FORMATS: [&dyn TraceFormat; 3] = [&mooncake::Mooncake, &azure::Azure, &vtc::Vtc];

/// Reads the trace file at `path`.
///
/// # Errors
/// If the file cannot be read, or a line does not match its format.
pub fn read(path: &Path, options: &TraceOptions) -> Result<Vec<Arrival>, TraceError> {
    let text = fs::read_to_string(path).map_err(|source| TraceError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    parse(&text, options).map_err(|(line, message)| TraceError::BadLine {
        path: path.to_owned(),
        line,
        message,
    })
}

/// Parses the text of a trace.
///
/// # Errors
/// The number of the first invalid line, counted from 1, and what is wrong with it.
pub(crate) fn parse(text: &str, options: &TraceOptions) -> Result<Vec<Arrival>, (usize, String)> {
    let first_line = text.lines().next().unwrap_or_default();
    let is_recording = recording::begins_with(first_line);
    if is_recording && !options.takes_recordings {
        let message = "a recording of `quorate record` is read with --from-decisions";
        return Err((1, message.to_owned()));
    }
    let (mut records, grain) = match is_recording {
        true => (recording::records(text, options.scale)?, Duration::ZERO),
        false => records(text, first_line)?,
    };
    records.sort_by_key(|record| record.at);
    let start = records.first().map_or(Duration::ZERO, |record| record.at);
    for record in &mut records {
        record.at -= start;
    }
    if let Some(first) = options.first {
        records.retain(|record| record.at < first);
    }
    spread(&mut records, grain);
    Ok(into_arrivals(records, options))
}

/// Reads a trace line by line. Returns its records, and the interval that timestamps are rounded to.
fn records(text: &str, first_line: &str) -> Result<(Vec<TraceRecord>, Duration), (usize, String)> {
    let format = FORMATS.iter().find(|format| format.begins_with(first_line)).ok_or((
        1,
        format!(
            "expected a recording of `quorate record`, a Mooncake record ({{\"timestamp\":..}}) or \
             the heading of an Azure or a VTC trace, found {}",
            shown(first_line)
        ),
    ))?;
    let mut records = Vec::new();
    for (index, line) in text.lines().enumerate().skip(format.heading_lines()) {
        if line.trim().is_empty() {
            continue;
        }
        records.push(format.read(line).map_err(|message| (index + 1, message))?);
    }
    Ok((records, format.grain()))
}

/// Spreads records with equal timestamps evenly over the grain, or up to the next timestamp if that
/// comes sooner: simultaneous requests are an artifact of rounding.
fn spread(records: &mut [TraceRecord], grain: Duration) {
    if grain.is_zero() {
        return;
    }
    let mut from = 0;
    while from < records.len() {
        let at = records[from].at;
        let length = records[from..]
            .iter()
            .take_while(|record| record.at == at)
            .count();
        let until = records
            .get(from + length)
            .map_or(at + grain, |next| next.at.min(at + grain));
        let step = (until - at) / u32::try_from(length).unwrap_or(u32::MAX);
        let mut moved = at;
        for record in &mut records[from..from + length] {
            record.at = moved;
            moved += step;
        }
        from += length;
    }
}

fn into_arrivals(records: Vec<TraceRecord>, options: &TraceOptions) -> Vec<Arrival> {
    let mut users = UserAssignment::new(options.users);
    let into_arrival = |(number, record): (usize, TraceRecord)| {
        let bytes = options.scale.apply(record.input_tokens) as usize * TOKEN_BYTES;
        let user = match &record.user {
            Some(user) => Arc::from(user.as_str()),
            None => users.pick(record.blocks.as_ref().map_or(&[], |(ids, _)| ids)),
        };
        let (ids, block_bytes) = match record.blocks {
            Some((ids, tokens)) => (ids, options.scale.apply(tokens) as usize * TOKEN_BYTES),
            None => (vec![number as u64], bytes),
        };
        Arrival {
            at: record.at,
            user,
            session: record.session,
            model: record.model,
            prompt: PromptSpec {
                ids,
                block_bytes,
                bytes,
                seed: options.seed,
            },
            output_tokens: options.scale.apply(record.output_tokens),
        }
    };
    records.into_iter().enumerate().map(into_arrival).collect()
}

/// Assignment of requests to users in which a conversation keeps its user: a request belongs to the
/// user who first sent its deepest known block. The first block does not count, because it is a
/// system prompt that all users share.
struct UserAssignment {
    names: Vec<Arc<str>>,
    owner: HashMap<u64, usize>,
    next: usize,
}

impl UserAssignment {
    fn new(count: u32) -> Self {
        let names = (1..=count.max(1))
            .map(|number| Arc::from(format!("user-{number}")))
            .collect();
        Self {
            names,
            owner: HashMap::new(),
            next: 0,
        }
    }

    fn pick(&mut self, blocks: &[u64]) -> Arc<str> {
        let own = blocks.get(1..).unwrap_or_default();
        let known = own.iter().rev().find_map(|id| self.owner.get(id).copied());
        let user = known.unwrap_or_else(|| {
            self.next += 1;
            (self.next - 1) % self.names.len()
        });
        for id in own {
            self.owner.entry(*id).or_insert(user);
        }
        self.names[user].clone()
    }
}

/// Converts the token count `name` of a record. Rejects counts above [`TOKENS_MAX`].
fn tokens(name: &str, value: u64) -> Result<u32, String> {
    u32::try_from(value)
        .ok()
        .filter(|_| value <= TOKENS_MAX)
        .ok_or_else(|| format!("expected {name} of at most {TOKENS_MAX}, found {value}"))
}

/// Splits a line of comma-separated values into `N` fields. `heading` names them in the error.
fn fields<'a, const N: usize>(line: &'a str, heading: &str) -> Result<[&'a str; N], String> {
    let found: Vec<&str> = line.trim_end().split(',').collect();
    <[&str; N]>::try_from(found).map_err(|found| {
        format!(
            "expected {N} fields ({heading}), found {}: {}",
            found.len(),
            shown(line)
        )
    })
}

/// Parses the field `name`, which contains a number of tokens.
fn token_field(name: &str, text: &str) -> Result<u32, String> {
    let value = text
        .parse::<u64>()
        .map_err(|_| format!("expected {name} as a whole number, found {}", shown(text)))?;
    tokens(name, value)
}

/// Formats text of a file for an error: quoted and shortened.
fn shown(text: &str) -> String {
    const SHOWN_CHARS: usize = 60;
    let mut short: String = text.chars().take(SHOWN_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}
