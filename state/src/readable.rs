//! How measurements are written in JSON: shares in per cent and times in milliseconds. In memory
//! they are integers, in thousandths, microseconds or nanoseconds.

use serde::{Serialize, Serializer};

/// A measurement; `None` if it is unknown.
pub trait Measurement {
    /// Returns the value as a number.
    fn number(&self) -> Option<f64>;
}

impl Measurement for u32 {
    fn number(&self) -> Option<f64> {
        Some(f64::from(*self))
    }
}

impl Measurement for i32 {
    fn number(&self) -> Option<f64> {
        Some(f64::from(*self))
    }
}

impl Measurement for Option<u32> {
    fn number(&self) -> Option<f64> {
        self.map(f64::from)
    }
}

/// Writes thousandths in per cent.
///
/// # Errors
/// Those of `serializer`.
pub fn percent<S: Serializer>(
    thousandths: &impl Measurement,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    scaled(thousandths, 10.0, serializer)
}

/// Writes microseconds in milliseconds.
///
/// # Errors
/// Those of `serializer`.
pub fn ms_of_us<S: Serializer>(us: &impl Measurement, serializer: S) -> Result<S::Ok, S::Error> {
    scaled(us, 1e3, serializer)
}

/// Writes nanoseconds in milliseconds.
///
/// # Errors
/// Those of `serializer`.
pub fn ms_of_ns<S: Serializer>(ns: &impl Measurement, serializer: S) -> Result<S::Ok, S::Error> {
    scaled(ns, 1e6, serializer)
}

/// Writes a range of nanoseconds in milliseconds, as least and most.
///
/// # Errors
/// Those of `serializer`.
pub fn ms_of_ns_range<S: Serializer>(
    ns: &Option<(u32, u32)>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let ms = |ns| f64::from(ns) / 1e6;
    ns.map(|(least, most)| [ms(least), ms(most)])
        .serialize(serializer)
}

fn scaled<S: Serializer>(
    value: &impl Measurement,
    unit: f64,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.number().map(|it| it / unit).serialize(serializer)
}
