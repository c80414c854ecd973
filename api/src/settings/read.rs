//! Reading of replicated settings from documents: of admission, of one user, and the defaults of
//! users.

use std::sync::LazyLock;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use state::admission::AdmissionSettings;
use state::command::{Rejection, UserDefaults, UserSettings};

use super::form;
use super::schema::{SettingError, schema_of, valid_part};

static ADMISSION: LazyLock<Value> = LazyLock::new(|| schema_of::<AdmissionSettings>(form::named));
static USER: LazyLock<Value> = LazyLock::new(|| schema_of::<UserSettings>(form::named));
static DEFAULTS: LazyLock<Value> = LazyLock::new(|| schema_of::<UserDefaults>(form::named));

/// Reads admission settings.
///
/// # Errors
/// Every fault, at least one.
pub fn read_admission(document: &Value) -> Result<AdmissionSettings, Vec<SettingError>> {
    read(&ADMISSION, document, AdmissionSettings::validate)
}

/// Reads the settings of one user.
///
/// # Errors
/// Every fault, at least one.
pub fn read_user(document: &Value) -> Result<UserSettings, Vec<SettingError>> {
    read(&USER, document, UserSettings::validate)
}

/// Reads the defaults of users.
///
/// # Errors
/// Every fault, at least one.
pub fn read_user_defaults(document: &Value) -> Result<UserDefaults, Vec<SettingError>> {
    read(&DEFAULTS, document, UserDefaults::validate)
}

/// Reads settings that have `schema`, and checks them with `validate`.
fn read<T: DeserializeOwned + Serialize>(
    schema: &Value,
    document: &Value,
    validate: impl FnOnce(&T) -> Result<(), Rejection>,
) -> Result<T, Vec<SettingError>> {
    let (valid, faults) = valid_part(form::named, schema, document);
    if !faults.is_empty() {
        return Err(faults);
    }
    let read: T = serde_json::from_value(valid).map_err(|error| {
        vec![SettingError {
            key: String::new(),
            found: error.to_string(),
            expected: "settings as docs/reference/config.md lists them".to_owned(),
        }]
    })?;
    match misfit(&read, validate(&read)) {
        Some(fault) => Err(vec![fault]),
        None => Ok(read),
    }
}

/// Returns the first value of `settings` that does not fit the others, according to `verdict`.
pub fn misfit(settings: &impl Serialize, verdict: Result<(), Rejection>) -> Option<SettingError> {
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use state::admission::{Batching, BinSelection, ChargeInput, Concurrency, Order};
    use state::budgets::Budget;
    use state::caches::CacheScope;
    use state::quotas::UserLimits;

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
            bin_batch_max: vec![64, 8],
            inter_token_us: 25_500,
            usage_days: 7,
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
            max_age is an unknown key (expected one of batching, bin_batch_max, bin_max_age, bin_selection, bins, charge, concurrency, inter_token, max_queue, max_wait, order, usage_days)
            inter_token is "2h" (expected a duration up to 1h, such as "25ms")
            bins is 65 (expected an integer from 1 to 64)"#]].assert_eq(&faults.join("\n"));
    }

    #[test]
    fn settings_of_users_as_shown_read_as_the_same() {
        let limits = UserLimits {
            requests: Some(5),
            tokens: Some(1 << 40),
            concurrent: Some(2),
            concurrent_per_tree: Some(3),
            tokens_per_tree: Some(1 << 41),
            window_ms: Some(60_000),
        };
        let budget = Budget {
            day: Some(1),
            month: None,
        };
        for cache in [CacheScope::Own, CacheScope::Group("a".to_owned())] {
            let defaults = UserDefaults {
                weight_milli: 250,
                cache: cache.clone(),
                limits,
                budget,
            };
            let written = serde_json::to_value(&defaults).unwrap();
            assert_eq!(read_user_defaults(&written).unwrap(), defaults, "{written}");
            let user = UserSettings {
                weight_milli: Some(250),
                limits: Some(limits),
                budget: Some(budget),
                models: vec!["m*".to_owned()],
                cache: Some(cache),
            };
            let written = serde_json::to_value(&user).unwrap();
            assert_eq!(read_user(&written).unwrap(), user, "{written}");
        }
        let nothing = json!({ "cache": null });
        assert_eq!(read_user_defaults(&nothing), Ok(UserDefaults::default()));
        assert_eq!(read_user(&nothing), Ok(UserSettings::default()));
    }

    #[test]
    fn all_faults_of_user_settings_are_found() {
        let told = |faults: Vec<SettingError>| {
            let faults = faults.iter();
            let told =
                faults.map(|it| format!("{} is {} (expected {})", it.key, it.found, it.expected));
            told.collect::<Vec<_>>().join("\n")
        };
        let wrong = json!({
            "weight_milli": 0,
            "cache": "group:",
            "limits": { "requests": 0, "window": "2days" },
            "budget": { "day": -1 },
            "priority": 3,
        });
        expect_test::expect![[r#"
            weight_milli is 0 (expected an integer from 1 to 4294967295)
            cache is "group:" (expected "shared", "isolated" or "group:NAME")
            limits.requests is 0 (expected an integer from 1 to 4294967295)
            limits.window is "2days" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
            budget.day is -1 (expected an integer from 1 to 9007199254740992)
            priority is an unknown key (expected one of budget, cache, limits, weight_milli)"#]].assert_eq(&told(read_user_defaults(&wrong).unwrap_err()));
        let wrong = json!({ "models": ["m", 5], "cache": "group:a\u{7}", "cache_group": "a" });
        expect_test::expect![[r#"
            models is a list (expected non-empty text)
            cache_group is an unknown key (expected one of budget, cache, limits, models, weight_milli)"#]].assert_eq(&told(read_user(&wrong).unwrap_err()));
        let faults = read_user(&json!({ "models": ["m".repeat(257)] })).unwrap_err();
        let keys: Vec<_> = faults.iter().map(|it| it.key.as_str()).collect();
        assert_eq!(keys, ["models"]);
    }
}
