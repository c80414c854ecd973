//! Settings of policies.

use expect_test::expect;

use super::*;

#[test]
fn tables_of_policies_are_the_settings_of_the_core() {
    let asked = config("node.id = 1\nrouting.allow_override = true");
    assert_eq!(asked.policy_overrides, PolicyConfig::defaults());
    assert_eq!(config("node.id = 1").policy_overrides, []);
    for policy in PolicyConfig::defaults() {
        let file = format!("node.id = 1\nrouting.policy = {:?}", policy.name());
        assert_eq!(config(&file).policy, policy);
        // Every setting has a key, but for those that are absent by default.
        let settings = serde_json::to_value(&policy).unwrap();
        for field in settings.as_object().unwrap().keys() {
            let path = format!("routing.{}.{field}", policy.name());
            let has_key = keys::KEYS.iter().any(|key| key.path == path);
            assert!(has_key || field == "policy", "{path}");
        }
    }
    // The bounds of a key are bounds of the setting.
    for key in policy_keys::POLICY_KEYS {
        let key::Kind::Integer { min, max } = key.kind else {
            continue;
        };
        let (table, _) = key.split();
        let policy = table.trim_start_matches("routing.");
        for value in [min, max] {
            let most = "routing.vtc-basic.token_tracker_max_tokens";
            let most = if policy == "vtc-basic" && key.path != most {
                format!("{most} = 4294967295")
            } else {
                String::new()
            };
            let least = "routing.vtc-basic.token_tracker_min_tokens";
            let least = if policy == "vtc-basic" && key.path != least {
                format!("{least} = 1")
            } else {
                String::new()
            };
            let path = key.path;
            let file = format!("node.id = 1\n{least}\n{most}\n{path} = {value}");
            assert_eq!(config(&file).policy.name(), "cost", "{path} = {value}");
        }
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
        })
    );
}
