//! Recorded traces: when requests came, how long they were, and which beginnings they shared.
//!
//! Three formats are read, told apart by their first line; each is a `TraceFormat`. A trace says
//! lengths in tokens; here a token is four bytes of text ([`crate::engine::text`]). Traces that
//! name blocks (Mooncake: 512 tokens each) get one text per block id, so equal ids are equal text
//! and equal beginnings are equal beginnings; other traces get a text of its own for each request.
//!
//! `scale` multiplies lengths and block size alike, which keeps the structure of shared prefixes
//! while the machine's load shrinks.

mod azure;
mod mooncake;
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

/// Tokens of one named block.
const BLOCK_TOKENS: u32 = 512;
/// Tokens a request can have in a trace; more is taken for a damaged line.
const TOKENS_MAX: u64 = 1 << 24;

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not what the format has there.
    #[error("{}:{line}: {message}", path.display())]
    BadLine {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What was expected, and what was found.
        message: String,
    },
}

/// One request of a trace, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Since the trace's beginning.
    pub at: Duration,
    /// Who sends it.
    pub user: Arc<str>,
    /// Its text.
    pub prompt: PromptSpec,
    /// Tokens the engine is asked for.
    pub output_tokens: u32,
}

/// How a trace is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceOptions {
    /// What lengths are multiplied with.
    pub scale: LengthScale,
    /// Only what comes before this; `None` reads all.
    pub first: Option<Duration>,
    /// Users the requests are spread over when the trace names none.
    pub users: u32,
    /// Seed of the texts.
    pub seed: u64,
}

/// A fraction that lengths are multiplied with: `1/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthScale {
    numerator: u32,
    denominator: u32,
}

impl LengthScale {
    /// Lengths as recorded.
    pub const ONE: Self = Self {
        numerator: 1,
        denominator: 1,
    };

    /// A scaled length, rounded up: nothing that was there vanishes.
    fn apply(self, tokens: u32) -> u32 {
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
        if !(BLOCK_TOKENS * numerator).is_multiple_of(denominator) {
            return Err(format!(
                "expected a scale that keeps {BLOCK_TOKENS}-token blocks whole"
            ));
        }
        Ok(Self {
            numerator,
            denominator,
        })
    }
}

/// A line of a trace, as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TraceRecord {
    /// Since whatever the format counts from.
    at: Duration,
    user: Option<String>,
    input_tokens: u32,
    output_tokens: u32,
    /// Ids of its blocks; `None` when the format names none.
    blocks: Option<Vec<u64>>,
}

/// A kind of trace file.
trait TraceFormat: Sync {
    /// Whether a file with this first line is of this kind.
    fn begins_with(&self, first_line: &str) -> bool;
    /// Lines before the first record.
    fn heading_lines(&self) -> usize;
    /// Reads a record; the error says what was expected and what was found.
    fn read(&self, line: &str) -> Result<TraceRecord, String>;
    /// The grain its timestamps were rounded to; zero when they are exact.
    fn grain(&self) -> Duration {
        Duration::ZERO
    }
}

const FORMATS: [&dyn TraceFormat; 3] = [&mooncake::Mooncake, &azure::Azure, &vtc::Vtc];

/// Reads a trace file.
///
/// # Errors
/// When it cannot be read, or a line is not what its format says.
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

/// Reads a trace; errors carry their line, from 1.
pub(crate) fn parse(text: &str, options: &TraceOptions) -> Result<Vec<Arrival>, (usize, String)> {
    let first_line = text.lines().next().unwrap_or_default();
    let format = FORMATS.iter().find(|format| format.begins_with(first_line)).ok_or((
        1,
        format!(
            "expected a Mooncake record ({{\"timestamp\":..}}) or the heading of an Azure or a VTC \
             trace, found {}",
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
    records.sort_by_key(|record| record.at);
    let start = records.first().map_or(Duration::ZERO, |record| record.at);
    for record in &mut records {
        record.at -= start;
    }
    if let Some(first) = options.first {
        records.retain(|record| record.at < first);
    }
    spread(&mut records, format.grain());
    Ok(into_arrivals(records, options))
}

/// Spreads records with equal timestamps evenly over the grain (or up to the next timestamp, when
/// that comes sooner): a burst every three seconds is how it was written down, not how it came.
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
            None => users.pick(record.blocks.as_deref().unwrap_or_default()),
        };
        let (ids, block_bytes) = match record.blocks {
            Some(ids) => (
                ids,
                options.scale.apply(BLOCK_TOKENS) as usize * TOKEN_BYTES,
            ),
            None => (vec![number as u64], bytes),
        };
        Arrival {
            at: record.at,
            user,
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

/// Deals requests to users so that a conversation stays with its user: a request belongs to whoever
/// first sent its deepest block that was seen before. Its very first block does not count, for that
/// is a system prompt that everybody shares.
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

/// A token count of a record.
fn tokens(name: &str, value: u64) -> Result<u32, String> {
    u32::try_from(value)
        .ok()
        .filter(|_| value <= TOKENS_MAX)
        .ok_or_else(|| format!("expected {name} of at most {TOKENS_MAX}, found {value}"))
}

/// The fields of a line of comma-separated values.
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

/// A field that is a number of tokens.
fn token_field(name: &str, text: &str) -> Result<u32, String> {
    let value = text
        .parse::<u64>()
        .map_err(|_| format!("expected {name} as a whole number, found {}", shown(text)))?;
    tokens(name, value)
}

/// Text of a file as an error shows it: quoted, and not all of it.
fn shown(text: &str) -> String {
    const SHOWN_CHARS: usize = 60;
    let mut short: String = text.chars().take(SHOWN_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}
