//! Bounds of what operators write: checked at the edge to answer early, and in `apply` because the
//! log may carry anything.

use crate::bounds::NAME_BYTES_MAX;
use crate::reject::Reject;
use crate::users::FairnessSettings;

/// Highest price of a token.
const PRICE_MAX: u32 = 1_000;

impl FairnessSettings {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Reject::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Reject> {
        ensure(
            self.input_price <= PRICE_MAX,
            "fairness.input_price",
            "at most 1000",
        )?;
        ensure(
            self.output_price <= PRICE_MAX,
            "fairness.output_price",
            "at most 1000",
        )
    }
}

/// Whether `text` can name something: not empty, within [`NAME_BYTES_MAX`].
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

/// Refuses `field` unless it `holds`.
pub(crate) fn ensure(holds: bool, field: &str, expected: &str) -> Result<(), Reject> {
    if holds {
        return Ok(());
    }
    Err(Reject::Invalid {
        field: field.to_owned(),
        expected: expected.to_owned(),
    })
}

/// Refuses a value below `least`.
pub(crate) fn at_least(field: &str, value: u32, least: u32) -> Result<(), Reject> {
    ensure(value >= least, field, &format!("at least {least}"))
}

/// Refuses a value above `most`.
pub(crate) fn at_most(field: &str, value: u32, most: u32) -> Result<(), Reject> {
    ensure(value <= most, field, &format!("at most {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::UserSpec;
    use crate::policy::{CostSettings, PolicyConfig};

    #[test]
    fn settings_have_bounds() {
        let near = CostSettings {
            near_permille: 1001,
            ..CostSettings::default()
        };
        assert!(PolicyConfig::Cost(near).validate().is_err());
        assert_eq!(
            PolicyConfig::Cost(CostSettings::default()).validate(),
            Ok(())
        );
        assert!(
            FairnessSettings {
                input_price: 1,
                output_price: 1001
            }
            .validate()
            .is_err()
        );
        assert_eq!(FairnessSettings::default().validate(), Ok(()));
        let weightless = UserSpec {
            name: "a".to_owned(),
            weight_milli: 0,
        };
        assert!(weightless.validate().is_err());
    }
}
