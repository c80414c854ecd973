//! How admission settings are written: `[admission]` of a config file, and `/admin/v1/admission`.
//! Names and units differ from those in the log.

use std::sync::LazyLock;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smart_default::SmartDefault;
use state::admission::{
    AdmissionSettings, BATCH_MAX, Batching, BinSelection, ChargeInput, MEMORY_Z_MILLI_MAX, Order,
    SlaSettings,
};
use state::budgets::Budget;
use state::command::Rejection;
use state::quotas::{TOKENS_MAX, UserLimits};

use super::form::{self, LongSpan, LongSpanOrZero, Parsed, Slots, Span, SpanOrZero, ms};
use super::schema::{SettingError, schema_of, valid_part};

/// The replicated settings of `[admission]`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdmissionForm {
    /// Order in which waiting requests of equal priority are served. Like all keys of `[admission]`
    /// except `codel_target` and `priority_max`, it is read when a cluster is created; later use
    /// `PUT /admin/v1/admission`.
    #[default(AdmissionSettings::default().order)]
    pub order: Order,
    /// Maximum number of concurrent requests per backend. `adaptive`: as many as its memory and
    /// `sla.inter_token` allow, once those are known.
    #[default(Parsed(AdmissionSettings::default().concurrency))]
    pub concurrency: Parsed<Slots>,
    /// Maximum number of waiting requests per model and replica; further ones get a 503. Each takes
    /// about 32 KiB, connection included.
    #[schemars(range(min = 1))]
    #[default(AdmissionSettings::default().queue_max)]
    pub max_queue: u32,
    /// Maximum waiting time; after that a request gets a 503. A request that is predicted to wait
    /// longer gets it immediately.
    #[default(ms(AdmissionSettings::default().wait_ms_max))]
    pub max_wait: Parsed<LongSpan>,
    /// Which prompt tokens are charged: only uncached ones, all, or all with cached ones at a
    /// tenth.
    #[default(AdmissionSettings::default().charge)]
    pub charge: ChargeInput,
    /// Slack of the gate: how far above the lowest waiting user's counter another user may still be
    /// served, in priced tokens. 0: the largest request seen.
    #[default(AdmissionSettings::default().gate_tokens)]
    pub gate_tokens: u32,
    /// Number of bins by predicted output length; 1 means no bins.
    #[schemars(range(min = 1, max = 64))]
    #[default(AdmissionSettings::default().bins)]
    pub bins: u16,
    /// Which bin is served next.
    #[default(AdmissionSettings::default().bin_selection)]
    pub bin_selection: BinSelection,
    /// A request that has waited this long is served before its bin's turn.
    #[default(ms(AdmissionSettings::default().bin_age_ms_max))]
    pub bin_max_age: Parsed<LongSpanOrZero>,
    /// `continuous`: bins only order the queue. `static`: a batch of one bin goes to one backend
    /// together, for engines whose batches end together.
    #[default(AdmissionSettings::default().batching)]
    pub batching: Batching,
    /// The target that `adaptive` keeps.
    pub sla: SlaForm,
    /// Limits of users without their own; `[users.defaults.limits]` sets the same ones.
    pub user_limits: UserLimitsForm,
}

/// Keys of `[admission.sla]`: the latency that `adaptive` batching keeps, and its bounds.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SlaForm {
    /// Target for the time between output tokens that `adaptive` keeps. 0: limit by memory alone.
    #[default(us(SlaSettings::default().inter_token_us))]
    pub inter_token: Parsed<SpanOrZero>,
    /// Tolerance around that target within which the limit stays unchanged.
    #[default(us(SlaSettings::default().tolerance_us))]
    pub tolerance: Parsed<SpanOrZero>,
    /// Lowest limit that `adaptive` sets.
    #[schemars(range(min = 1))]
    #[default(SlaSettings::default().batch_min)]
    pub min_batch: u32,
    /// Highest limit that `adaptive` sets.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    #[default(SlaSettings::default().batch_max)]
    pub max_batch: u32,
    /// Safety margin of the memory limit, in thousandths of a standard deviation: with 1645,
    /// requests exceed the cache with a probability of 5 %.
    #[schemars(range(max = MEMORY_Z_MILLI_MAX))]
    #[default(SlaSettings::default().memory_z_milli)]
    pub memory_z_milli: u32,
}

/// Keys of `[admission.user_limits]`, and the limits of one user: how much they may use per window.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimitsForm {
    /// Requests per window for users without their own limits. Default: unlimited.
    #[schemars(range(min = 1))]
    pub requests: Option<u32>,
    /// Tokens per window, not counting cached ones. Default: unlimited.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub tokens: Option<u64>,
    /// Concurrent requests. Default: unlimited.
    #[schemars(range(min = 1))]
    pub concurrent: Option<u32>,
    /// Length of the window. Default: one second.
    pub window: Option<Parsed<Span>>,
}

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schema_of::<AdmissionForm>(form::named));
static LIMITS: LazyLock<Value> = LazyLock::new(|| schema_of::<UserLimitsForm>(form::named));
static BUDGET: LazyLock<Value> = LazyLock::new(|| schema_of::<Budget>(form::named));

impl AdmissionForm {
    /// Reads the settings in a document.
    ///
    /// # Errors
    /// Every fault, at least one.
    pub fn read(document: &Value) -> Result<Self, Vec<SettingError>> {
        let read = read_form::<Self>(&SCHEMA, document)?;
        // Whether values fit together can be told once each is valid by itself.
        match read.misfit() {
            Some(fault) => Err(vec![fault]),
            None => Ok(read),
        }
    }

    /// Returns the first value that does not fit the others.
    #[must_use]
    pub fn misfit(&self) -> Option<SettingError> {
        let Err(Rejection::Invalid { field, expected }) = self.settings().validate() else {
            return None;
        };
        let key = written(&field);
        let values = serde_json::to_value(self).unwrap_or_default();
        let found = values.pointer(&format!("/{}", key.replace('.', "/")));
        Some(SettingError {
            found: found.unwrap_or_default().to_string(),
            key,
            expected: written(&expected),
        })
    }

    /// Returns the settings as the log has them.
    #[must_use]
    pub fn settings(&self) -> AdmissionSettings {
        AdmissionSettings {
            order: self.order,
            concurrency: *self.concurrency,
            queue_max: self.max_queue,
            wait_ms_max: millis(*self.max_wait),
            charge: self.charge,
            gate_tokens: self.gate_tokens,
            bins: self.bins,
            bin_selection: self.bin_selection,
            bin_age_ms_max: millis(*self.bin_max_age),
            batching: self.batching,
            sla: SlaSettings {
                inter_token_us: micros(*self.sla.inter_token),
                tolerance_us: micros(*self.sla.tolerance),
                batch_min: self.sla.min_batch,
                batch_max: self.sla.max_batch,
                memory_z_milli: self.sla.memory_z_milli,
            },
            user_limits: self.user_limits.limits(),
        }
    }
}

impl UserLimitsForm {
    /// Reads the limits of a user.
    ///
    /// # Errors
    /// Every fault, at least one.
    pub fn read(document: &Value) -> Result<Self, Vec<SettingError>> {
        read_form(&LIMITS, document)
    }

    /// Returns the limits as the log has them.
    #[must_use]
    pub fn limits(&self) -> UserLimits {
        UserLimits {
            requests: self.requests,
            tokens: self.tokens,
            concurrent: self.concurrent,
            window_ms: self.window.as_deref().copied().map(millis),
        }
    }
}

impl From<&UserLimits> for UserLimitsForm {
    fn from(limits: &UserLimits) -> Self {
        Self {
            requests: limits.requests,
            tokens: limits.tokens,
            concurrent: limits.concurrent,
            window: limits.window_ms.map(ms),
        }
    }
}

/// Reads a user's budget: tokens per `day` and `month`.
///
/// # Errors
/// Every fault, at least one.
pub fn read_budget(document: &Value) -> Result<Budget, Vec<SettingError>> {
    read_form(&BUDGET, document)
}

pub(super) fn read_form<T: DeserializeOwned>(
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

impl From<&AdmissionSettings> for AdmissionForm {
    fn from(settings: &AdmissionSettings) -> Self {
        let sla = &settings.sla;
        Self {
            order: settings.order,
            concurrency: Parsed(settings.concurrency),
            max_queue: settings.queue_max,
            max_wait: ms(settings.wait_ms_max),
            charge: settings.charge,
            gate_tokens: settings.gate_tokens,
            bins: settings.bins,
            bin_selection: settings.bin_selection,
            bin_max_age: ms(settings.bin_age_ms_max),
            batching: settings.batching,
            sla: SlaForm {
                inter_token: us(sla.inter_token_us),
                tolerance: us(sla.tolerance_us),
                min_batch: sla.batch_min,
                max_batch: sla.batch_max,
                memory_z_milli: sla.memory_z_milli,
            },
            user_limits: UserLimitsForm::from(&settings.user_limits),
        }
    }
}

/// Names of settings in the log, and how operators write them.
const NAMES: [(&str, &str); 8] = [
    ("queue_max", "max_queue"),
    ("wait_ms_max", "max_wait"),
    ("bin_age_ms_max", "bin_max_age"),
    ("batch_min", "min_batch"),
    ("batch_max", "max_batch"),
    ("inter_token_us", "inter_token"),
    ("tolerance_us", "tolerance"),
    ("window_ms", "window"),
];

/// Whether a document has names that the admin API took before it took those of config files.
#[must_use]
pub fn is_former(document: &Value) -> bool {
    let has_name = |table: &Value| NAMES.iter().any(|(name, _)| table.get(name).is_some());
    let tables = [document, &document["sla"], &document["user_limits"]];
    document["concurrency"].is_object() || tables.into_iter().any(has_name)
}

/// The same of the limits of a user.
#[must_use]
pub fn are_former_limits(limits: &Value) -> bool {
    NAMES.iter().any(|(name, _)| limits.get(name).is_some())
}

/// Returns a field of the log's settings, or words about one, as operators write it.
fn written(field: &str) -> String {
    let field = match field.strip_prefix("limits.") {
        Some(limit) => format!("user_limits.{limit}"),
        None => field.to_owned(),
    };
    let names = NAMES.iter();
    names.fold(field, |field, (name, written)| field.replace(name, written))
}

fn millis(span: Duration) -> u32 {
    u32::try_from(span.as_millis()).unwrap_or(u32::MAX)
}

fn micros(span: Duration) -> u32 {
    u32::try_from(span.as_micros()).unwrap_or(u32::MAX)
}

fn us(us: u32) -> Parsed<SpanOrZero> {
    Parsed(Duration::from_micros(us.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use state::admission::Concurrency;

    use super::*;

    fn unlike_the_defaults() -> AdmissionSettings {
        AdmissionSettings {
            order: Order::Fcfs,
            concurrency: Concurrency::Fixed(3),
            queue_max: 7,
            wait_ms_max: 90_500,
            charge: ChargeInput::Full,
            gate_tokens: 9,
            bins: 4,
            bin_selection: BinSelection::LongestQueue,
            bin_age_ms_max: 1500,
            batching: Batching::Continuous,
            sla: SlaSettings {
                inter_token_us: 25_500,
                tolerance_us: 0,
                batch_min: 2,
                batch_max: 64,
                memory_z_milli: 0,
            },
            user_limits: UserLimits {
                requests: Some(5),
                tokens: Some(1 << 40),
                concurrent: Some(2),
                window_ms: Some(60_000),
            },
        }
    }

    #[test]
    fn written_settings_round_trip() {
        // What `state` takes and a config file would not say.
        let extreme = AdmissionSettings {
            wait_ms_max: u32::MAX,
            bin_age_ms_max: 0,
            ..AdmissionSettings::default()
        };
        extreme.validate().unwrap();
        let slowest = AdmissionSettings {
            bin_age_ms_max: u32::MAX,
            sla: SlaSettings {
                inter_token_us: u32::MAX,
                tolerance_us: u32::MAX,
                ..SlaSettings::default()
            },
            ..extreme
        };
        for settings in [
            AdmissionSettings::default(),
            unlike_the_defaults(),
            extreme,
            slowest,
        ] {
            let written = serde_json::to_value(AdmissionForm::from(&settings)).unwrap();
            assert!(!is_former(&written), "{written}");
            let read = AdmissionForm::read(&written).unwrap();
            assert_eq!(read.settings(), settings, "{written}");
        }
    }

    #[test]
    fn every_former_name_is_recognised() {
        let former = serde_json::to_value(unlike_the_defaults()).unwrap();
        assert!(is_former(&former));
        let of_today = serde_json::to_value(AdmissionForm::default()).unwrap();
        for (part, pointer) in [("", ""), ("sla", "/sla"), ("user_limits", "/user_limits")] {
            let names = former.pointer(pointer).and_then(Value::as_object).unwrap();
            let today = of_today.pointer(pointer).unwrap();
            for name in names.keys().filter(|name| today.get(name).is_none()) {
                let mut document = json!({});
                document[name] = json!(1);
                let document = match part {
                    "" => document,
                    part => json!({ part: document }),
                };
                assert!(is_former(&document), "{document}");
                assert!(AdmissionForm::read(&document).is_err(), "{document}");
            }
        }
    }

    #[test]
    fn all_errors_are_reported_with_expectations() {
        let document = json!({
            "order": "lifo",
            "concurrency": 0,
            "max_queue": "many",
            "max_wait": 5,
            "max_age": "1s",
            "sla": { "min_batch": -1, "inter_token": "0s" },
            "user_limits": [],
            "bins": null,
        });
        let faults = AdmissionForm::read(&document).unwrap_err();
        let faults: Vec<_> = faults
            .iter()
            .map(|it| format!("{} is {} (expected {})", it.key, it.found, it.expected))
            .collect();
        expect_test::expect![[r#"
            order is "lifo" (expected "vtc" or "vtc-max-fair" or "vtc-pred" or "dlpm" or "lcf" or "rpm" or "fcfs")
            concurrency is 0 (expected an integer from 1 to 65536, "adaptive" or "unlimited")
            max_queue is "many" (expected an integer from 1 to 4294967295)
            max_wait is 5 (expected a duration from 1ms to 49days, such as "20ms" or "1m 30s")
            max_age is an unknown key (expected one of batching, bin_max_age, bin_selection, bins, charge, concurrency, gate_tokens, max_queue, max_wait, order, sla, user_limits)
            sla.min_batch is -1 (expected an integer from 1 to 4294967295)
            user_limits is a list (expected an object)"#]].assert_eq(&faults.join("\n"));
        let misfit = json!({ "sla": { "min_batch": 9, "max_batch": 8 } });
        let faults = AdmissionForm::read(&misfit).unwrap_err();
        expect_test::expect![[r#"
            [
                SettingError {
                    key: "sla.max_batch",
                    found: "8",
                    expected: "at least sla.min_batch",
                },
            ]
        "#]]
        .assert_debug_eq(&faults);
    }
}
