//! Values of `--policy`: a policy with its settings, or a reference policy.

use serde_json::{Map, Value};
use state::policy::{CostSettings, POLICY_NAMES, PolicyConfig};

use super::literal_policies::ReferencePolicy;

/// A policy to simulate.
#[derive(Debug, Clone, PartialEq)]
pub struct SimPolicy {
    /// The policy as given on the command line.
    pub label: String,
    /// Policy of the product. If `reference_policy` decides, `config` only determines when a match
    /// refreshes the age of the blocks that it finds.
    pub config: PolicyConfig,
    /// Policy of a paper or of another router that decides instead of `config`, if any.
    pub reference_policy: Option<ReferencePolicy>,
}

impl Default for SimPolicy {
    /// Returns the default policy of a new cluster.
    fn default() -> Self {
        let config = PolicyConfig::Cost(CostSettings::default());
        Self {
            label: config.name().to_owned(),
            config,
            reference_policy: None,
        }
    }
}

impl SimPolicy {
    /// Parses `NAME[:KEY=VALUE]...`.
    ///
    /// # Errors
    /// If the policy, a setting or its value is invalid, with what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        if let Some(reference_policy) = ReferencePolicy::named(name) {
            if !settings.is_empty() {
                return Err(format!("{name} has no settings"));
            }
            return Ok(Self {
                label: text.to_owned(),
                config: PolicyConfig::LeastRequest,
                reference_policy: Some(reference_policy),
            });
        }
        if !POLICY_NAMES.contains(&name) {
            let written = ReferencePolicy::ALL.map(ReferencePolicy::name).join(", ");
            let names = POLICY_NAMES.join(", ");
            return Err(format!(
                "expected one of {names}, with settings as NAME:KEY=VALUE:KEY=VALUE; or {written}"
            ));
        }
        let mut table = Map::from_iter([("policy".to_owned(), name.into())]);
        for setting in settings.split(':').filter(|setting| !setting.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| format!("{setting}: expected KEY=VALUE"))?;
            // Numbers and booleans are JSON; everything else is a string.
            let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
            table.insert(key.to_owned(), value);
        }
        let config: PolicyConfig =
            serde_json::from_value(Value::Object(table)).map_err(|error| error.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(Self {
            label: text.to_owned(),
            config,
            reference_policy: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use state::policy::{BlockNaming, PrefixCacheSettings, VllmCacheAwareSettings};

    use super::*;

    #[test]
    fn a_policy_parses_with_its_settings() {
        let plain = SimPolicy::parse("prefix-cache").unwrap();
        let defaults = PolicyConfig::PrefixCache(PrefixCacheSettings::default());
        assert_eq!((plain.config, plain.reference_policy), (defaults, None));
        let set = SimPolicy::parse("prefix-cache:imbalance_abs_count=8:min_match_blocks=1");
        let set = set.unwrap();
        assert_eq!(
            set.label,
            "prefix-cache:imbalance_abs_count=8:min_match_blocks=1"
        );
        let expected = PrefixCacheSettings {
            imbalance_abs_count: 8,
            min_match_blocks: 1,
            ..PrefixCacheSettings::default()
        };
        assert_eq!(set.config, PolicyConfig::PrefixCache(expected));
        let word = SimPolicy::parse("vllm-cache-aware:hashing=position").unwrap();
        let expected = VllmCacheAwareSettings {
            hashing: BlockNaming::Position,
            ..VllmCacheAwareSettings::default()
        };
        assert_eq!(word.config, PolicyConfig::VllmCacheAware(expected));
        let written = SimPolicy::parse("prefix-cache-as-written").unwrap();
        assert_eq!(written.reference_policy, Some(ReferencePolicy::PrefixCache));
    }

    #[test]
    fn invalid_policies_are_reported() {
        for (text, part) in [
            ("nonsense", "expected one of cost, "),
            ("epp:kv_weight", "kv_weight: expected KEY=VALUE"),
            ("cost:nonsense=1", "nonsense"),
            ("epp:kv_weight=2000", "kv_weight"),
            ("random:a=1", "unknown field `a`"),
            ("prefix-cache-as-written:a=1", "has no settings"),
        ] {
            let fault = SimPolicy::parse(text).unwrap_err();
            assert!(fault.contains(part), "{text}: {fault}");
        }
    }
}
