//! Implements Python functions that chat templates rely on: `json.dumps` and `strftime`.
//!
//! Templates are written for `transformers`, whose `tojson` is Python's `json.dumps` without HTML
//! escapes, and whose `strftime_now` formats the current time. A difference of one character
//! changes all following tokens.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Maximum nesting depth of a value that is written as JSON.
const DEPTH_MAX: usize = 64;

/// Implements the `tojson` filter, with the arguments of `json.dumps` that templates use.
pub(super) fn tojson(value: &Value, kwargs: &Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let style = DumpsStyle {
        is_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        is_sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: indent.filter(|it| !it.is_none()).as_ref().map(indentation),
        separators,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

fn indentation(value: &Value) -> String {
    match usize::try_from(value.clone()) {
        Ok(width) => " ".repeat(width.min(DEPTH_MAX)),
        Err(_) => value.as_str().unwrap_or_default().to_owned(),
    }
}

/// Options of `json.dumps`, as given to `tojson`.
struct DumpsStyle {
    is_ascii: bool,
    is_sorted: bool,
    /// Indentation per nesting level; `None` for a single line.
    indent: Option<String>,
    /// Separators between items, and between key and value; `None` for Python's defaults.
    separators: Option<Vec<String>>,
}

impl DumpsStyle {
    fn between_items(&self) -> &str {
        let own = if self.indent.is_some() { "," } else { ", " };
        let given = self.separators.as_ref().and_then(|pair| pair.first());
        given.map_or(own, String::as_str)
    }

    fn behind_keys(&self) -> &str {
        let given = self.separators.as_ref().and_then(|pair| pair.get(1));
        given.map_or(": ", String::as_str)
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(cannot("nested too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value)?,
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => self.write_map(out, value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.write_list(out, value, depth)?,
            _ => return Err(cannot("not JSON serializable")),
        }
        Ok(())
    }

    fn write_list(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        out.push('[');
        let mut is_first = true;
        for item in value.try_iter()? {
            if !std::mem::take(&mut is_first) {
                out.push_str(self.between_items());
            }
            self.break_line(out, depth + 1);
            self.write(out, &item, depth + 1)?;
        }
        if !is_first {
            self.break_line(out, depth);
        }
        out.push(']');
        Ok(())
    }

    fn write_map(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys = value.try_iter()?.collect::<Vec<Value>>();
        if self.is_sorted {
            keys.sort();
        }
        out.push('{');
        let mut is_first = true;
        for key in keys {
            if !std::mem::take(&mut is_first) {
                out.push_str(self.between_items());
            }
            self.break_line(out, depth + 1);
            match key.as_str() {
                Some(text) => self.write_text(out, text),
                None => self.write_text(out, &key.to_string()),
            }
            out.push_str(self.behind_keys());
            self.write(out, &value.get_item(&key)?, depth + 1)?;
        }
        if !is_first {
            self.break_line(out, depth);
        }
        out.push('}');
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                letter if letter < ' ' || (self.is_ascii && !letter.is_ascii()) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("a string takes all text");
                    }
                }
                letter => out.push(letter),
            }
        }
        out.push('"');
    }
}

fn cannot(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return Ok(());
    }
    out.push_str(&float_repr(f64::try_from(value.clone())?));
    Ok(())
}

/// Formats a float like Python's `repr`: the shortest digits that round-trip, with an exponent
/// below 1e-4 and from 1e16.
fn float_repr(number: f64) -> String {
    if !number.is_finite() {
        let name = if number.is_nan() { "NaN" } else { "Infinity" };
        let sign = if number < 0.0 { "-" } else { "" };
        return format!("{sign}{name}");
    }
    let digits = format!("{number:e}");
    let (mantissa, exponent) = digits.split_once('e').unwrap_or((&digits, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') {
        plain
    } else {
        plain + ".0"
    }
}

/// Returns the number of days since 1970-01-01, in UTC.
pub(super) fn today() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs() / DAY.as_secs())
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats the start of `day`, in days since 1970-01-01, like Python's `strftime`. The time is
/// always 0:00, because a prompt that changed every second would never be found in a cache.
pub(super) fn strftime(day: u64, format: &str) -> Result<String, Error> {
    let (year, month, date) = civil(day);
    let weekday = usize::try_from((day + 4) % 7).unwrap_or(0);
    let month_name = MONTHS[(month - 1) as usize];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let text = match letters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{date:02}"),
            Some('e') => format!("{date:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => WEEKDAYS[weekday].to_owned(),
            Some('a') => WEEKDAYS[weekday][..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{date:02}"),
            Some('j') => format!("{:03}", day - days_before(year) + 1),
            Some('H' | 'M' | 'S') => "00".to_owned(),
            Some('I') => "12".to_owned(),
            Some('p') => "AM".to_owned(),
            Some('-') => match letters.next() {
                Some('d') => date.to_string(),
                Some('m') => month.to_string(),
                _ => return Err(cannot("strftime_now: this format is not known")),
            },
            Some('%') => "%".to_owned(),
            _ => return Err(cannot("strftime_now: this format is not known")),
        };
        out.push_str(&text);
    }
    Ok(out)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Returns the number of days from 1970-01-01 to the start of `year`, which is at least 1970.
fn days_before(year: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

/// Returns year, month and day of month of `day`. Month and day of month start at 1.
fn civil(day: u64) -> (u64, u64, u64) {
    let mut year = 1970 + day / 366;
    while days_before(year + 1) <= day {
        year += 1;
    }
    let mut rest = day - days_before(year);
    let february = if is_leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::json;

    use super::*;

    #[test]
    fn json_is_formatted_like_python() {
        let value = json!({"b": [1, 2.0, true, null], "a": "<é\n\u{7f}\u{1}😀>", "e": [], "o": {}});
        let value = Value::from(Serde(value));
        let none = Kwargs::from_iter([("indent", Value::from(()))]);
        let plain = tojson(&value, &none).unwrap();
        assert_eq!(
            plain,
            "{\"b\": [1, 2.0, true, null], \"a\": \"<é\\n\u{7f}\\u0001😀>\", \"e\": [], \"o\": {}}"
        );
        let options = [
            ("indent", Value::from(2)),
            ("sort_keys", Value::from(true)),
            ("ensure_ascii", Value::from(true)),
        ];
        assert_eq!(
            tojson(&value, &Kwargs::from_iter(options)).unwrap(),
            "{\n  \"a\": \"<\\u00e9\\n\u{7f}\\u0001\\ud83d\\ude00>\",\n  \"b\": [\n    1,\n    2.0,\n    true,\n    null\n  ],\n  \"e\": [],\n  \"o\": {}\n}"
        );
    }

    #[test]
    fn floats_are_formatted_like_python() {
        let cases = [
            (0.0, "0.0"),
            (-0.5, "-0.5"),
            (100.0, "100.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (1e-4, "0.0001"),
            (1e300, "1e+300"),
            (0.1, "0.1"),
            (123_456.789, "123456.789"),
        ];
        for (number, expected) in cases {
            assert_eq!(float_repr(number), expected);
        }
    }

    #[test]
    fn strftime_names_days_correctly() {
        let at = |day, format| strftime(day, format).unwrap();
        assert_eq!(at(0, "%A %d %B %Y"), "Thursday 01 January 1970");
        assert_eq!(at(19_782, "%F %j"), "2024-02-29 060");
        assert_eq!(at(19_783, "%d %b %Y %H:%M"), "01 Mar 2024 00:00");
        assert_eq!(at(20_818, "%a %-d.%-m.%y 100%%"), "Thu 31.12.26 100%");
        assert_eq!(at(47_540, "%F"), "2100-02-28");
        assert_eq!(at(47_541, "%F"), "2100-03-01");
        assert!(strftime(0, "%Q").is_err());
    }
}
