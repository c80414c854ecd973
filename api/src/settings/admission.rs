//! Reading of the settings of `[admission]`, and of users' limits and budgets, from documents.

use std::sync::LazyLock;

use serde::de::DeserializeOwned;
use serde_json::Value;
use state::admission::AdmissionSettings;
use state::budgets::Budget;
use state::command::Rejection;
use state::quotas::UserLimits;

use super::form;
use super::schema::{SettingError, schema_of, valid_part};

static ADMISSION: LazyLock<Value> = LazyLock::new(|| schema_of::<AdmissionSettings>(form::named));
static LIMITS: LazyLock<Value> = LazyLock::new(|| schema_of::<UserLimits>(form::named));
static BUDGET: LazyLock<Value> = LazyLock::new(|| schema_of::<Budget>(form::named));

/// Reads admission settings.
///
/// # Errors
/// Every fault, at least one.
pub fn read_admission(document: &Value) -> Result<AdmissionSettings, Vec<SettingError>> {
    read_settings(&ADMISSION, document)
}

/// Reads the limits of a user.
///
/// # Errors
/// Every fault, at least one.
pub fn read_limits(document: &Value) -> Result<UserLimits, Vec<SettingError>> {
    read_settings(&LIMITS, document)
}

/// Reads a user's budget: tokens per `day` and `month`.
///
/// # Errors
/// Every fault, at least one.
pub fn read_budget(document: &Value) -> Result<Budget, Vec<SettingError>> {
    read_settings(&BUDGET, document)
}

/// Returns the first value of `settings` that does not fit the others, according to `verdict`.
pub(super) fn misfit(
    settings: &impl serde::Serialize,
    verdict: Result<(), Rejection>,
) -> Option<SettingError> {
    let Err(Rejection::Invalid { field, expected }) = verdict else {
        return None;
    };
    let values = serde_json::to_value(settings).unwrap_or_default();
    let found = values.pointer(&format!("/{}", field.replace('.', "/")));
    Some(SettingError {
        found: found.unwrap_or_default().to_string(),
        key: field,
        expected,
    })
}

pub(super) fn read_settings<T: DeserializeOwned>(
    schema: &Value,
    document: &Value,
) -> Result<T, Vec<SettingError>> {
    let (valid, faults) = valid_part(form::named, schema, document);
    if !faults.is_empty() {
        return Err(faults);
    }
    serde_json::from_value(valid).map_err(|error| {
        vec![SettingError {
            key: String::new(),
            found: error.to_string(),
            expected: "settings as docs/reference/config.md lists them".to_owned(),
        }]
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use state::admission::{Batching, BinSelection, ChargeInput, Concurrency, Order};

    use super::*;

    #[test]
    fn settings_as_shown_read_as_the_same() {
        let unlike_the_defaults = AdmissionSettings {
            order: Order::Fcfs,
            concurrency: Concurrency::Fixed(3),
            max_queue: 7,
            max_wait_ms: 90_500,
            charge: ChargeInput::Full,
            bins: 4,
            bin_selection: BinSelection::LongestQueue,
            bin_max_age_ms: 1500,
            batching: Batching::Static,
            inter_token_us: 25_500,
            ..AdmissionSettings::default()
        };
        // What `state` takes and a config file would not say.
        let extreme = AdmissionSettings {
            max_wait_ms: u32::MAX,
            bin_max_age_ms: u32::MAX,
            inter_token_us: u32::MAX,
            ..AdmissionSettings::default()
        };
        for settings in [AdmissionSettings::default(), unlike_the_defaults, extreme] {
            settings.validate().unwrap();
            let shown = serde_json::to_value(&settings).unwrap();
            assert_eq!(read_admission(&shown).unwrap(), settings, "{shown}");
            // Others deserialize them without the schema.
            let direct: AdmissionSettings = serde_json::from_value(shown).unwrap();
            assert_eq!(direct, settings);
        }
    }

    #[test]
    fn all_faults_are_found_with_what_was_expected() {
        let document = json!({
            "order": "best",
            "concurrency": 0,
            "max_queue": "many",
            "max_wait": 5,
            "max_age": "1s",
            "inter_token": "2h",
            "bins": 65,
        });
        let faults = read_admission(&document).unwrap_err();
        let faults: Vec<_> = faults
            .iter()
            .map(|it| format!("{} is {} (expected {})", it.key, it.found, it.expected))
            .collect();
        expect_test::expect![[r#"
            order is "best" (expected "vtc" or "vtc-max-fair" or "vtc-pred" or "dlpm" or "lcf" or "rpm" or "fcfs")
            concurrency is 0 (expected an integer from 1 to 65536, "adaptive" or "unlimited")
            max_queue is "many" (expected an integer from 1 to 4294967295)
            max_wait is 5 (expected a duration from 1ms to 49days, such as "20ms" or "1m 30s")
            max_age is an unknown key (expected one of batching, bin_max_age, bin_selection, bins, charge, concurrency, inter_token, max_queue, max_wait, order)
            inter_token is "2h" (expected a duration up to 1h, such as "25ms")
            bins is 65 (expected an integer from 1 to 64)"#]].assert_eq(&faults.join("\n"));
    }
}
