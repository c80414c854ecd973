//! Tests of the settings of policies.

use expect_test::expect;

use super::*;

#[test]
fn policy_tables_equal_the_settings_of_state() {
    let asked = config("node.id = 1\nrouting.allow_override = true");
    assert_eq!(asked.policy_overrides, PolicyConfig::defaults());
    assert_eq!(config("node.id = 1").policy_overrides, []);
    for policy in PolicyConfig::defaults() {
        let file = format!("node.id = 1\nrouting.policy = {:?}", policy.name());
        assert_eq!(config(&file).policy, policy);
    }
    let tables = schema::sections().into_iter();
    for table in tables.filter(|section| section.path.starts_with("routing.")) {
        for (name, schema) in &table.keys {
            bounds_are_those_of_the_core(&table.path, name, schema);
        }
    }
}

/// Checks that the key accepts exactly the values that the policy accepts.
fn bounds_are_those_of_the_core(table: &str, name: &str, schema: &serde_json::Value) {
    let (Some(min), Some(max)) = (schema["minimum"].as_i64(), schema["maximum"].as_i64()) else {
        return;
    };
    let policy = table.trim_start_matches("routing.");
    let validate = |value: i64| {
        let mut settings = serde_json::json!({ "policy": policy, name: value });
        // These two must be in order, so the one that is not tested gets its widest value.
        if policy == "vtc-basic" {
            let most = "token_tracker_max_tokens";
            let least = "token_tracker_min_tokens";
            if name != most {
                settings[most] = u32::MAX.into();
            }
            if name != least {
                settings[least] = 1.into();
            }
        }
        let policy: PolicyConfig = serde_json::from_value(settings).ok()?;
        policy.validate().ok()
    };
    for value in [min, max] {
        assert!(validate(value).is_some(), "{table}.{name} = {value}");
    }
    for value in [min - 1, max + 1] {
        assert!(validate(value).is_none(), "{table}.{name} = {value}");
    }
}

#[test]
fn settings_of_a_policy_are_checked_together() {
    faults(
        r#"
node.id = 1
routing.allow_override = 1
[routing.vtc-basic]
token_tracker_max_tokens = 999
[routing.session]
header = "a b"
[routing.epp]
prefix_weight = 0
queue_weight = 0
kv_weight = 0
"#,
        expect![[r#"
            3:26: routing.allow_override is 1 (expected true or false)
            5:28: routing.vtc-basic.token_tracker_max_tokens is 999 (expected at least token_tracker_min_tokens)
            7:10: routing.session.header is "a b" (expected a header's name of at most 256 bytes)
            9:17: routing.epp.prefix_weight is 0 (expected at least one of prefix_weight, queue_weight and kv_weight above 0)
        "#]],
    );
    let file = r#"
node.id = 1
routing.policy = "session"
[routing.session]
header = "x-chat"
cookie = "sid"
"#;
    assert_eq!(
        config(file).policy,
        PolicyConfig::Session(state::policy::SessionSettings {
            header: "x-chat".to_owned(),
            cookie: Some("sid".to_owned()),
            client_address: false,
        })
    );
}
