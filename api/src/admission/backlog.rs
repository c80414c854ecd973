//! Wire format of backlog reports, in which replicas send each other summaries of their waiting
//! requests. The reports bypass the log, because they go stale quickly.

use state::admission::Backlog;
use state::ids::ModelKey;

use crate::routing::{LoadReportError, put_number, take_number};

/// Maximum number of models per report. If there are more, those with the greatest keys are
/// omitted, and their requests hold back no request at other replicas.
pub const MODELS_PER_REPORT_MAX: usize = 256;
/// Maximum size of a report, in bytes.
pub const REPORT_BYTES_MAX: usize = MODELS_PER_REPORT_MAX * (8 + 2 + 10 + 5 + 5);

/// Encodes a replica's backlog for its peers. Each model, in ascending key order, has its key
/// (eight bytes) and priority (two bytes), little-endian, and three LEB128 numbers: least counter,
/// users, requests. The report is empty if nothing waits.
#[must_use]
pub fn encode(lines: &[(ModelKey, Backlog)]) -> Vec<u8> {
    let mut sorted = lines.to_vec();
    sorted.sort_unstable_by_key(|(model, _)| *model);
    sorted.truncate(MODELS_PER_REPORT_MAX);
    let mut bytes = Vec::new();
    for (model, backlog) in sorted {
        bytes.extend(model.0.to_le_bytes());
        bytes.extend(backlog.priority.to_le_bytes());
        put_number(&mut bytes, backlog.least_milli);
        put_number(&mut bytes, u64::from(backlog.users));
        put_number(&mut bytes, u64::from(backlog.waiting));
    }
    bytes
}

/// Decodes a report into backlogs in ascending order of their models' keys.
///
/// # Errors
/// Returns a [`LoadReportError`] if `bytes` are not a valid report.
pub fn decode(mut bytes: &[u8]) -> Result<Vec<(ModelKey, Backlog)>, LoadReportError> {
    let mut lines: Vec<(ModelKey, Backlog)> = Vec::new();
    while let Some((key, rest)) = bytes.split_first_chunk() {
        let (priority, rest) = rest.split_first_chunk().ok_or(LoadReportError::Malformed)?;
        bytes = rest;
        let model = ModelKey(u64::from_le_bytes(*key));
        let is_ascending = lines.last().is_none_or(|(before, _)| *before < model);
        if !is_ascending || lines.len() == MODELS_PER_REPORT_MAX {
            return Err(LoadReportError::Malformed);
        }
        let small = |number: u64| u32::try_from(number).map_err(|_| LoadReportError::Malformed);
        let backlog = Backlog {
            priority: i16::from_le_bytes(*priority),
            least_milli: take_number(&mut bytes)?,
            users: small(take_number(&mut bytes)?)?,
            waiting: small(take_number(&mut bytes)?)?,
        };
        lines.push((model, backlog));
    }
    if bytes.is_empty() {
        Ok(lines)
    } else {
        Err(LoadReportError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(model: u64, waiting: u32) -> (ModelKey, Backlog) {
        let backlog = Backlog {
            priority: -3,
            least_milli: 1_000_000,
            users: 2,
            waiting,
        };
        (ModelKey(model), backlog)
    }

    #[test]
    fn malformed_reports_are_refused() {
        let unordered = [encode(&[line(3, 1)]), encode(&[line(2, 1)])].concat();
        let long: Vec<u8> = (0..=MODELS_PER_REPORT_MAX as u64)
            .flat_map(|model| encode(&[line(model, 1)]))
            .collect();
        for bytes in [&[1, 2, 3][..], &[0; 8], &[0; 10], &unordered, &long] {
            assert_eq!(decode(bytes), Err(LoadReportError::Malformed));
        }
    }

    #[test]
    fn a_report_is_truncated_to_its_bound() {
        let lines: Vec<_> = (0..1000).map(|model| line(model, 9)).collect();
        let report = encode(&lines);
        assert!(report.len() <= REPORT_BYTES_MAX);
        assert_eq!(decode(&report).unwrap(), lines[..MODELS_PER_REPORT_MAX]);
    }

    proptest! {
        #[test]
        fn reports_round_trip(
            lines in proptest::collection::btree_map(
                any::<u64>(),
                (any::<i16>(), any::<u64>(), any::<u32>(), any::<u32>()),
                0..20,
            )
        ) {
            let lines: Vec<_> = lines
                .into_iter()
                .map(|(model, (priority, least_milli, users, waiting))| {
                    let backlog = Backlog { priority, least_milli, users, waiting };
                    (ModelKey(model), backlog)
                })
                .collect();
            prop_assert_eq!(decode(&encode(&lines)), Ok(lines));
        }

        #[test]
        fn arbitrary_bytes_are_a_report_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..80)
        ) {
            let _ = decode(&bytes);
        }
    }
}
