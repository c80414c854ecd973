//! Reads the Prometheus text exposition format, strictly and within bounds.
//!
//! An engine's response on `/metrics` is untrusted input. A line that does not follow the format is
//! an error with its line number; nothing is guessed, and only escaped label values are copied.
//! Source: the Prometheus text format 0.0.4; timestamps and exemplars of OpenMetrics are skipped.

use std::borrow::Cow;

/// Maximum length of a page, in bytes.
pub const PAGE_BYTES_MAX: usize = 4 << 20;
/// Maximum length of a line, in bytes.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of labels of one sample.
pub const LABELS_MAX: usize = 64;

/// One sample of a page.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Name including suffixes, such as `vllm:prefix_cache_hits_total`.
    pub name: &'a str,
    /// Labels of the sample, already validated.
    pub labels: SampleLabels<'a>,
    /// Value of the sample; may be infinite or NaN.
    pub value: f64,
}

/// Labels of a sample: the text between the braces.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampleLabels<'a>(&'a str);

/// Error for a page that does not follow the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetricsPageError {
    /// The page is too long.
    #[error("metrics page is longer than {PAGE_BYTES_MAX} bytes")]
    TooLong,
    /// The page is not UTF-8.
    #[error("metrics page is not utf-8 at byte {offset}")]
    NotText {
        /// Offset of the first invalid byte.
        offset: usize,
    },
    /// A line is not a sample, comment or blank.
    #[error("metrics page line {line}: expected {expected}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// What was expected.
        expected: &'static str,
    },
}

/// Calls `sample` for every sample of `page`, in order.
///
/// # Errors
/// Returns a [`MetricsPageError`] at the first fault, after `sample` was called for the samples
/// before it.
pub fn read<'a>(
    page: &'a [u8],
    mut sample: impl FnMut(Sample<'a>),
) -> Result<(), MetricsPageError> {
    if page.len() > PAGE_BYTES_MAX {
        return Err(MetricsPageError::TooLong);
    }
    let text = std::str::from_utf8(page).map_err(|fault| MetricsPageError::NotText {
        offset: fault.valid_up_to(),
    })?;
    for (number, line) in text.split('\n').enumerate() {
        let bad = |expected| MetricsPageError::Line {
            line: number + 1,
            expected,
        };
        if line.len() > LINE_BYTES_MAX {
            return Err(bad("at most 65536 bytes"));
        }
        let line = line.trim_matches([' ', '\t', '\r']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        sample(read_line(line).map_err(bad)?);
    }
    Ok(())
}

fn read_line(line: &str) -> Result<Sample<'_>, &'static str> {
    let name_end = line
        .find(|c: char| !is_name_char(c))
        .ok_or("a value after the name")?;
    let (name, rest) = line.split_at(name_end);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err("a metric name");
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => {
            let end = labels_end(inside)?;
            (SampleLabels(&inside[..end]), &inside[end + 1..])
        }
        None if rest.starts_with([' ', '\t']) => (SampleLabels::default(), rest),
        None => return Err("a blank or labels after the name"),
    };
    let mut words = rest.split([' ', '\t']).filter(|word| !word.is_empty());
    let value = words.next().ok_or("a value")?;
    let value = value.parse().map_err(|_| "a number as the value")?;
    match words.next() {
        None | Some("#") => {}
        Some(timestamp) => {
            timestamp
                .parse::<f64>()
                .map_err(|_| "a timestamp or nothing after the value")?;
            if !matches!(words.next(), None | Some("#")) {
                return Err("nothing after the timestamp");
            }
        }
    }
    Ok(Sample {
        name,
        labels,
        value,
    })
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Returns the position of the closing brace in `inside`, after validating every label before it.
fn labels_end(inside: &str) -> Result<usize, &'static str> {
    let bytes = inside.as_bytes();
    let mut at = 0;
    for _ in 0..=LABELS_MAX {
        at = skip_blanks(bytes, at);
        if bytes.get(at) == Some(&b'}') {
            return Ok(at);
        }
        at = label_end(bytes, at)?;
        at = skip_blanks(bytes, at);
        match bytes.get(at) {
            Some(b',') => at += 1,
            Some(b'}') => return Ok(at),
            _ => return Err("a comma or brace after a label"),
        }
    }
    Err("at most 64 labels")
}

fn skip_blanks(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\t')) {
        at += 1;
    }
    at
}

/// Returns the end of the label at `at`, which has the form `name="value"` with the escapes `\\`,
/// `\"` and `\n` in the value.
fn label_end(bytes: &[u8], at: usize) -> Result<usize, &'static str> {
    let mut end = at;
    while bytes
        .get(end)
        .is_some_and(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b':'))
    {
        end += 1;
    }
    if end == at || bytes.get(end..end + 2) != Some(b"=\"") {
        return Err("a label as name=\"value\"");
    }
    end += 2;
    loop {
        match bytes.get(end) {
            Some(b'"') => return Ok(end + 1),
            Some(b'\\') if matches!(bytes.get(end + 1), Some(b'\\' | b'"' | b'n')) => end += 2,
            Some(b'\\') => return Err("one of \\\\ \\\" \\n as an escape"),
            Some(_) => end += 1,
            None => return Err("a closing quote"),
        }
    }
}

impl<'a> SampleLabels<'a> {
    /// Returns the unescaped value of the label `name`, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Cow<'a, str>> {
        self.iter()
            .find_map(|(label, value)| (label == name).then_some(value))
    }

    /// Iterates over the labels with their values, unescaped.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, Cow<'a, str>)> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            rest = rest.trim_start_matches([' ', '\t', ',']);
            let equals = rest.find('=')?;
            // The labels were validated: a quoted value follows the equals sign.
            let end = label_end(rest.as_bytes(), 0).ok()?;
            let label = (&rest[..equals], unescape(&rest[equals + 2..end - 1]));
            rest = &rest[end..];
            Some(label)
        })
    }
}

fn unescape(raw: &str) -> Cow<'_, str> {
    if !raw.contains('\\') {
        return Cow::Borrowed(raw);
    }
    let mut value = String::with_capacity(raw.len());
    let mut chars = raw.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => value.push('\n'),
                Some(escaped) => value.push(escaped),
                None => {}
            },
            c => value.push(c),
        }
    }
    Cow::Owned(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(page: &str) -> Result<Vec<String>, MetricsPageError> {
        let mut lines = Vec::new();
        read(page.as_bytes(), |sample| {
            let labels: Vec<_> = sample
                .labels
                .iter()
                .map(|(name, value)| format!("{name}={value:?}"))
                .collect();
            lines.push(format!(
                "{} [{}] {}",
                sample.name,
                labels.join(" "),
                sample.value
            ));
        })?;
        Ok(lines)
    }

    #[test]
    fn samples_are_read_with_labels_escapes_timestamps_and_exemplars() {
        let page = "# HELP a text\n# TYPE a gauge\na 1\r\nb{} 2.5\nc{x=\"1\"} +Inf\n\
            d{ x=\"q\\\"\\\\\\n\" , y=\"}{,=\", } NaN 1700000000\ne_bucket{le=\"1\"} 3 # {id=\"7\"} 0.5 1.0\n";
        assert_eq!(
            all(page).unwrap(),
            [
                "a [] 1",
                "b [] 2.5",
                "c [x=\"1\"] inf",
                "d [x=\"q\\\"\\\\\\n\" y=\"}{,=\"] NaN",
                "e_bucket [le=\"1\"] 3",
            ]
        );
    }

    #[test]
    fn a_parse_error_names_its_line() {
        for (page, line, expected) in [
            ("<html>", 1, "a metric name"),
            ("a{x=\"1\"", 1, "a comma or brace after a label"),
            ("ok 1\n9a 1", 2, "a metric name"),
            ("a", 1, "a value after the name"),
            ("a ", 1, "a value after the name"),
            ("a{} ", 1, "a value"),
            ("a-b 1", 1, "a blank or labels after the name"),
            ("a{x=1} 1", 1, "a label as name=\"value\""),
            ("a{x=\"1} 1", 1, "a closing quote"),
            ("a{x=\"\\t\"} 1", 1, "one of \\\\ \\\" \\n as an escape"),
            ("a{x=\"1\" y=\"2\"} 1", 1, "a comma or brace after a label"),
            ("a one", 1, "a number as the value"),
            ("a 1 later", 1, "a timestamp or nothing after the value"),
            ("a 1 2 3", 1, "nothing after the timestamp"),
        ] {
            let bad = MetricsPageError::Line { line, expected };
            assert_eq!(all(page), Err(bad), "{page:?}");
        }
    }

    #[test]
    fn metrics_text_is_bounded() {
        let long_line = format!("a{{x=\"{}\"}} 1", "y".repeat(LINE_BYTES_MAX));
        assert!(matches!(
            all(&long_line),
            Err(MetricsPageError::Line { line: 1, .. })
        ));
        let labels = "x=\"1\",".repeat(LABELS_MAX + 1);
        assert!(all(&format!("a{{{labels}}} 1")).is_err());
        let page = vec![b'\n'; PAGE_BYTES_MAX + 1];
        assert_eq!(read(&page, |_| {}), Err(MetricsPageError::TooLong));
        assert_eq!(
            read(b"a 1\n\xff", |_| {}),
            Err(MetricsPageError::NotText { offset: 4 })
        );
    }

    proptest! {
        #[test]
        fn arbitrary_metrics_bytes_never_panic(page in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = read(&page, |sample| { sample.labels.iter().for_each(drop); });
        }

        #[test]
        fn almost_valid_metrics_never_panic(page in "[a{}=\",\\\\n 1#\n-]{0,64}") {
            let _ = read(page.as_bytes(), |sample| { sample.labels.iter().for_each(drop); });
        }

        #[test]
        fn metrics_text_round_trips(value in any::<String>(), number in -1e9..1e9f64) {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let page = format!("m{{k=\"{escaped}\"}} {number}");
            let mut seen = None;
            read(page.as_bytes(), |sample| seen = Some((sample.labels.get("k").unwrap().into_owned(), sample.value))).unwrap();
            prop_assert_eq!(seen, Some((value, number)));
        }
    }
}
