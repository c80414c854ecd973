//! Config errors. All are reported together, each with file, line, column, excerpt and what was
//! expected.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

/// Maximum width of rendered errors, in columns.
const COLUMNS_MAX: usize = 100;

/// One error in a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Description of the fault, usually the key and its value.
    pub message: String,
    /// Description of the valid values.
    pub expected: String,
    /// Location of the error.
    pub place: Place,
}

/// Source of a value or location of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Byte range in the file.
    File(Range<usize>),
    /// Environment variable, by name.
    Variable(String),
    /// `--set` flag, by its value.
    Flag(String),
    /// `--backend` flag, by its URL.
    Backend(String),
    /// None: the value is missing or a default, or the file cannot be read.
    Nowhere,
}

/// All errors of a config, at least one.
#[derive(Debug)]
pub struct ConfigErrors {
    /// Name of the file, as given.
    pub file: String,
    /// Text of the file.
    pub text: String,
    /// Errors in the file by position, then all others.
    pub errors: Vec<ConfigError>,
}

impl ConfigErrors {
    /// Creates the errors of a config. Sorts those in the file by position, before variables,
    /// flags, and errors without a location.
    #[must_use]
    pub fn new(file: String, text: String, mut errors: Vec<ConfigError>) -> Self {
        errors.sort_by_key(|error| match &error.place {
            Place::File(span) => (0, span.start),
            Place::Variable(_) => (1, 0),
            Place::Flag(_) | Place::Backend(_) => (2, 0),
            Place::Nowhere => (3, 0),
        });
        Self { file, text, errors }
    }

    /// Renders all errors as text, each with an excerpt of the file. Cuts lines of the file to
    /// `columns`, the width of the terminal, and to 100 columns if it is wider or `None`.
    #[must_use]
    pub fn render(&self, is_coloured: bool, columns: Option<usize>) -> String {
        let renderer = if is_coloured {
            Renderer::styled()
        } else {
            Renderer::plain()
        };
        let renderer = renderer.term_width(columns.unwrap_or(COLUMNS_MAX).min(COLUMNS_MAX));
        let mut out = String::new();
        for error in &self.errors {
            out.push_str(&renderer.render(&[self.report(error)]));
            out.push_str("\n\n");
        }
        let count = self.errors.len();
        let noun = if count == 1 { "fault" } else { "faults" };
        out.push_str(&format!("{}: {count} {noun}\n", self.file));
        out
    }

    /// Returns the location of the byte at offset `at` as `FILE:LINE:COLUMN`.
    #[must_use]
    pub fn line(&self, at: usize) -> String {
        let (line, column) = line_and_column(&self.text, at);
        format!("{}:{line}:{column}", self.file)
    }

    fn report<'a>(&'a self, error: &'a ConfigError) -> Group<'a> {
        let message = &error.message;
        let expected = format!("expected {}", error.expected);
        let title = match &error.place {
            Place::File(span) => {
                let label = AnnotationKind::Primary.span(span.clone()).label(expected);
                let excerpt = Snippet::source(&self.text)
                    .path(&self.file)
                    .annotation(label);
                return Level::ERROR.primary_title(message).element(excerpt);
            }
            Place::Variable(name) => format!("environment variable {name}: {message}"),
            Place::Flag(flag) => format!("--set {flag}: {message}"),
            Place::Backend(url) => format!("--backend {url}: {message}"),
            Place::Nowhere => message.clone(),
        };
        Level::ERROR
            .primary_title(title)
            .element(Level::HELP.message(expected))
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false, None))
    }
}

impl std::error::Error for ConfigErrors {}

/// Returns the line and the column, both counted from 1, of the byte of `text` at offset `at`.
#[must_use]
pub(super) fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(at.min(text.len()))];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    (line, column)
}
