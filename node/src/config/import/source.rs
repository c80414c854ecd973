//! What is read from another router's files: settings with their lines, or a fault.

/// A setting of another router, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    /// Its name, such as `--port` or `flowControl.maxRequests`.
    pub(super) name: String,
    /// Its values as written; none for a switch.
    pub(super) values: Vec<String>,
    /// Its line, counted from 1.
    pub(super) line: usize,
}

/// Why a file cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) message: String,
    pub(super) expected: String,
}

impl Setting {
    pub(super) fn new(name: &str, values: Vec<String>, line: usize) -> Self {
        let name = name.to_owned();
        Self { name, values, line }
    }

    /// Whether a switch is on; `None` if its value says neither.
    pub(super) fn is_on(&self) -> Option<bool> {
        match self.values.first().map(|value| value.to_ascii_lowercase()) {
            None => Some(true),
            Some(value) => match value.as_str() {
                "" | "1" | "true" | "yes" | "on" => Some(true),
                "0" | "false" | "no" | "off" => Some(false),
                _ => None,
            },
        }
    }

    /// Whether the value is an empty text.
    pub(super) fn is_empty(&self) -> bool {
        !self.values.is_empty() && self.values.iter().all(|value| value.trim().is_empty())
    }

    /// Whether the value is the word for "off", not a number.
    pub(super) fn is_false(&self) -> bool {
        let value = self.values.first();
        value.is_some_and(|value| ["false", "off", "no"].contains(&value.as_str()))
    }

    /// Whether a shell, Kubernetes or Helm fills in a value.
    pub(super) fn is_filled_in(&self) -> bool {
        self.values
            .iter()
            .any(|it| it.contains('$') || it.contains("{{"))
    }
}

impl Fault {
    pub(super) fn new(line: usize, message: &str, expected: &str) -> Self {
        let (message, expected) = (message.to_owned(), expected.to_owned());
        Self {
            line,
            message,
            expected,
        }
    }
}
