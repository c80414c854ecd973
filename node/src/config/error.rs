//! Config errors: collected so that all are reported at once, with file, line, column, excerpt and
//! what was expected.

use std::fmt;
use std::ops::Range;

use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, NamedSource};

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// What was found, and of which key.
    pub message: String,
    /// What was expected there.
    pub expected: String,
    /// Where.
    pub place: Place,
}

/// Where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// At these bytes of the file.
    File(Range<usize>),
    /// In this environment variable.
    Variable(String),
    /// In this `--set` flag.
    Flag(String),
    /// Nowhere: something is missing, or the file itself cannot be read.
    Nowhere,
}

/// All mistakes of a config, never none.
#[derive(Debug)]
pub struct ConfigErrors {
    /// The file's name as it was given.
    pub file: String,
    /// What stands in it.
    pub text: String,
    /// In the order they stand there.
    pub errors: Vec<ConfigError>,
}

impl ConfigErrors {
    /// Errors of one file, in the order they stand there; those of variables and flags follow.
    #[must_use]
    pub fn new(file: String, text: String, mut errors: Vec<ConfigError>) -> Self {
        errors.sort_by_key(|error| match &error.place {
            Place::File(span) => (0, span.start),
            Place::Variable(_) => (1, 0),
            Place::Flag(_) => (2, 0),
            Place::Nowhere => (3, 0),
        });
        Self { file, text, errors }
    }

    /// For people: each error with the line it stands on.
    #[must_use]
    pub fn render(&self, is_coloured: bool) -> String {
        let theme = if is_coloured {
            GraphicalTheme::unicode()
        } else {
            GraphicalTheme::unicode_nocolor()
        };
        let handler = GraphicalReportHandler::new_themed(theme)
            .with_width(100)
            .with_links(false);
        let mut out = String::new();
        for error in &self.errors {
            let report = self.report(error);
            // Writing to a `String` does not fail; a handler that did would lose only this error.
            if handler.render_report(&mut out, report.as_ref()).is_err() {
                out.push_str(&error.message);
            }
        }
        let count = self.errors.len();
        let noun = if count == 1 { "fault" } else { "faults" };
        out.push_str(&format!("{}: {count} {noun}\n", self.file));
        out
    }

    fn report(&self, error: &ConfigError) -> miette::Report {
        let diagnostic = match &error.place {
            Place::File(span) => MietteDiagnostic::new(error.message.clone()).with_label(
                LabeledSpan::at(span.clone(), format!("expected {}", error.expected)),
            ),
            Place::Variable(name) => {
                MietteDiagnostic::new(format!("environment variable {name}: {}", error.message))
                    .with_help(format!("expected {}", error.expected))
            }
            Place::Flag(flag) => MietteDiagnostic::new(format!("--set {flag}: {}", error.message))
                .with_help(format!("expected {}", error.expected)),
            Place::Nowhere => MietteDiagnostic::new(error.message.clone())
                .with_help(format!("expected {}", error.expected)),
        };
        let source = NamedSource::new(&self.file, self.text.clone()).with_language("toml");
        miette::Report::new(diagnostic).with_source_code(source)
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for ConfigErrors {}

/// Line and column, from 1, of a byte of `text`.
#[must_use]
pub(super) fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(at.min(text.len()))];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    (line, column)
}
