//! Azure's LLM inference traces (Azure/AzurePublicDataset): comma-separated arrival, context tokens
//! and generated tokens, without users and prefixes.

use std::time::Duration;

use super::{TraceFormat, TraceRecord, fields, shown, token_field};

pub(super) struct Azure;

const HEADING: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

impl TraceFormat for Azure {
    fn begins_with(&self, first_line: &str) -> bool {
        first_line.trim_end() == HEADING
    }

    fn heading_lines(&self) -> usize {
        1
    }

    fn read(&self, line: &str) -> Result<TraceRecord, String> {
        let [at, input, output] = fields(line, HEADING)?;
        let at = instant(at).ok_or_else(|| {
            format!(
                "expected TIMESTAMP as YYYY-MM-DD HH:MM:SS.fraction, found {}",
                shown(at)
            )
        })?;
        Ok(TraceRecord {
            at,
            user: None,
            input_tokens: token_field("ContextTokens", input)?,
            output_tokens: token_field("GeneratedTokens", output)?,
            session: [None, None],
            model: None,
            blocks: None,
        })
    }
}

/// Parses a timestamp as the time since 1 March of year 0 of the Gregorian calendar. Returns `None`
/// if `text` has another form.
fn instant(text: &str) -> Option<Duration> {
    let (date, time) = text.split_once(' ')?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (
        time.next()?.parse::<u64>().ok()?,
        time.next()?.parse::<u64>().ok()?,
    );
    let seconds = time.next()?.parse::<f64>().ok()?;
    let is_date =
        (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 23 || minute > 59 || !(0.0..61.0).contains(&seconds) {
        return None;
    }
    // Years start in March here, so that a leap day is the last day of a year.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let whole = ((days * 24 + hour) * 60 + minute) * 60;
    Some(Duration::from_secs(whole) + Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::instant;

    #[test]
    fn azure_timestamps_follow_the_calendar() {
        let between = |from: &str, to: &str| {
            (instant(to).expect("a date") - instant(from).expect("a date")).as_secs()
        };
        assert_eq!(between("2023-11-16 23:59:59", "2023-11-17 00:00:00"), 1);
        assert_eq!(
            between("2024-02-28 00:00:00", "2024-03-01 00:00:00"),
            2 * 86_400
        );
        assert_eq!(
            between("2023-02-28 00:00:00", "2023-03-01 00:00:00"),
            86_400
        );
        assert_eq!(between("2023-12-31 23:00:00", "2024-01-01 00:00:00"), 3600);
        assert_eq!(
            between("2000-01-01 00:00:00", "2001-01-01 00:00:00"),
            366 * 86_400
        );
        for bad in [
            "",
            "2023-11-16",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "a-b-c d:e:f",
        ] {
            assert_eq!(instant(bad), None, "{bad}");
        }
    }
}
