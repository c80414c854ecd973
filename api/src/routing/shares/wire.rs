//! Wire format of share reports, which go from replica to replica and never through the log.
//!
//! Layout: a version byte; session and report number, eight bytes each, little-endian; the run's
//! generation in LEB128; the epoch in eight bytes. The number of replicas heard follows, each with
//! id (one byte), session (eight bytes) and generation. Each backend, in ascending slot order,
//! follows as LEB128 numbers: slot delta, incarnation, running, waiting, milliseconds waited,
//! recent, and the number of recipients of places. Each recipient follows with its id (one byte)
//! and the number of places.

use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, Incarnation, ReplicaId, SessionId, Slot};
use state::shares::{Demand, Epoch, PlaceReport, Run, ShareReport};

use crate::routing::{LoadReportError, put_number, take_number};

/// Version of the format, the first byte of a report.
const VERSION: u8 = 1;
/// Maximum number of replicas, or of recipients of places at one backend, in a report.
const REPLICAS_MAX: u64 = u8::MAX as u64;
/// Length of the header that [`is_same`] ignores: version, session and report number.
const HEAD_BYTES: usize = 1 + 8 + 8;

/// Whether two encoded reports are equal apart from session and report number.
#[must_use]
pub fn is_same(one: &[u8], other: &[u8]) -> bool {
    one.get(HEAD_BYTES..) == other.get(HEAD_BYTES..)
}

/// Encodes a share report.
#[must_use]
pub fn encode(report: &ShareReport) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    bytes.extend(report.run.session.0.to_le_bytes());
    bytes.extend(report.number.to_le_bytes());
    put_number(&mut bytes, report.run.generation);
    bytes.extend(report.epoch.0.to_le_bytes());
    put_number(&mut bytes, report.heard.len() as u64);
    for (id, run) in &report.heard {
        bytes.push(id.0);
        bytes.extend(run.session.0.to_le_bytes());
        put_number(&mut bytes, run.generation);
    }
    let mut previous = 0;
    for place in &report.places {
        let (slot, demand) = (place.backend.slot.0, &place.demand);
        put_number(&mut bytes, u64::from(slot - previous));
        previous = slot;
        put_number(&mut bytes, u64::from(place.backend.incarnation.0));
        for number in [
            demand.running,
            demand.waiting,
            demand.waited_ms,
            demand.recent,
        ] {
            put_number(&mut bytes, u64::from(number));
        }
        put_number(&mut bytes, place.given.len() as u64);
        for (id, places) in &place.given {
            bytes.push(id.0);
            put_number(&mut bytes, *places);
        }
    }
    bytes
}

/// Decodes a share report.
///
/// # Errors
/// Returns a [`LoadReportError`] if `bytes` have an unknown version or are not a valid report.
pub fn decode(bytes: &[u8]) -> Result<ShareReport, LoadReportError> {
    let (&version, mut rest) = bytes.split_first().ok_or(LoadReportError::Malformed)?;
    if version != VERSION {
        return Err(LoadReportError::Version(version));
    }
    let rest = &mut rest;
    let session = SessionId(take_word(rest)?);
    let number = take_word(rest)?;
    let generation = take_number(rest)?;
    let epoch = Epoch(take_word(rest)?);
    let mut heard = Vec::new();
    for _ in 0..take_count(rest)? {
        let id = ReplicaId(take_byte(rest)?);
        let session = SessionId(take_word(rest)?);
        let generation = take_number(rest)?;
        let run = Run {
            session,
            generation,
        };
        heard.push((id, run));
    }
    let mut places: Vec<PlaceReport> = Vec::new();
    while !rest.is_empty() {
        let previous = places.last().map(|it| it.backend.slot);
        places.push(take_place(rest, previous)?);
    }
    let run = Run {
        session,
        generation,
    };
    Ok(ShareReport {
        run,
        number,
        epoch,
        heard,
        places,
    })
}

fn take_place(rest: &mut &[u8], previous: Option<Slot>) -> Result<PlaceReport, LoadReportError> {
    let step = take_number(rest)?;
    let slot = match previous {
        Some(_) if step == 0 => return Err(LoadReportError::Malformed),
        previous => step.saturating_add(previous.map_or(0, |slot| u64::from(slot.0))),
    };
    if slot >= BACKENDS_MAX as u64 {
        return Err(LoadReportError::Malformed);
    }
    let slot = Slot(u16::try_from(slot).map_err(|_| LoadReportError::Malformed)?);
    let incarnation = Incarnation(take_small(rest)?);
    let demand = Demand {
        running: take_small(rest)?,
        waiting: take_small(rest)?,
        waited_ms: take_small(rest)?,
        recent: take_small(rest)?,
    };
    let mut given = Vec::new();
    for _ in 0..take_count(rest)? {
        given.push((ReplicaId(take_byte(rest)?), take_number(rest)?));
    }
    Ok(PlaceReport {
        backend: BackendRef { slot, incarnation },
        demand,
        given,
    })
}

fn take_small(rest: &mut &[u8]) -> Result<u32, LoadReportError> {
    u32::try_from(take_number(rest)?).map_err(|_| LoadReportError::Malformed)
}

fn take_count(rest: &mut &[u8]) -> Result<u64, LoadReportError> {
    let count = take_number(rest)?;
    if count > REPLICAS_MAX {
        return Err(LoadReportError::Malformed);
    }
    Ok(count)
}

fn take_byte(rest: &mut &[u8]) -> Result<u8, LoadReportError> {
    let (&byte, after) = rest.split_first().ok_or(LoadReportError::Malformed)?;
    *rest = after;
    Ok(byte)
}

fn take_word(rest: &mut &[u8]) -> Result<u64, LoadReportError> {
    let (word, after) = rest.split_first_chunk().ok_or(LoadReportError::Malformed)?;
    *rest = after;
    Ok(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn report(places: Vec<PlaceReport>) -> ShareReport {
        let run = |session, generation| Run {
            session: SessionId(session),
            generation,
        };
        ShareReport {
            run: run(0x0102, 3),
            number: 4,
            epoch: Epoch(0x0506),
            heard: vec![(ReplicaId(2), run(7, 300))],
            places,
        }
    }

    fn place(slot: u16, given: &[(u8, u64)]) -> PlaceReport {
        PlaceReport {
            backend: BackendRef {
                slot: Slot(slot),
                incarnation: Incarnation(9),
            },
            demand: Demand {
                running: 1,
                waiting: 2,
                waited_ms: 300,
                recent: 4,
            },
            given: given.iter().map(|(id, it)| (ReplicaId(*id), *it)).collect(),
        }
    }

    #[test]
    fn shares_reports_have_golden_bytes() {
        let bytes = encode(&report(vec![place(5, &[(2, 200)]), place(8, &[])]));
        let expected = [
            &[1][..],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[4, 0, 0, 0, 0, 0, 0, 0],
            &[3],
            &[6, 5, 0, 0, 0, 0, 0, 0],
            &[1, 2, 7, 0, 0, 0, 0, 0, 0, 0, 0xac, 2],
            &[5, 9, 1, 2, 0xac, 2, 4, 1, 2, 0xc8, 1],
            &[3, 9, 1, 2, 0xac, 2, 4, 0],
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn shares_reports_are_compared_without_their_numbers() {
        let (mut one, other) = (report(Vec::new()), report(vec![place(1, &[])]));
        let first = encode(&one);
        one.number += 1;
        assert!(is_same(&first, &encode(&one)));
        assert!(!is_same(&first, &encode(&other)));
    }

    #[test]
    fn malformed_reports_are_refused() {
        let whole = encode(&report(vec![place(5, &[(2, 200)])]));
        let cut = |at: usize| decode(&whole[..at]);
        let empty = encode(&report(Vec::new())).len();
        for at in (0..whole.len()).filter(|at| *at != empty) {
            assert_eq!(cut(at), Err(LoadReportError::Malformed), "{at}");
        }
        assert_eq!(decode(&[9]), Err(LoadReportError::Version(9)));
        let twice = encode(&report(vec![place(5, &[]), place(5, &[])]));
        assert_eq!(decode(&twice), Err(LoadReportError::Malformed));
    }

    proptest! {
        #[test]
        fn reports_round_trip(
            slots in proptest::collection::btree_map(0..1024_u16, proptest::collection::vec((any::<u8>(), any::<u64>()), 0..4), 0..20),
        ) {
            let places = slots.iter().map(|(slot, given)| place(*slot, given)).collect();
            let report = report(places);
            prop_assert_eq!(decode(&encode(&report)), Ok(report));
        }

        #[test]
        fn arbitrary_bytes_are_a_report_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..120)
        ) {
            let _ = decode(&bytes);
            let _ = decode(&[&[VERSION][..], &bytes].concat());
        }
    }
}
