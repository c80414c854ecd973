//! Tests of aliases, fallbacks and splits of models.

use super::*;

#[test]
fn names_of_models_lead_to_models() {
    let config = config(
        r#"
node.id = 1
[[models]]
name = "large"
aliases = ["gpt-4o", "best"]
fallback = "cheap"
[[models]]
name = "small"
aliases = ["cheap"]
[[splits]]
model = "chat"
by = "session"
to = [{ model = "best", weight = 9 }, { model = "small" }, { model = "adapter" }]
[[backends]]
id = "a"
url = "http://a:1"
models = ["adapter"]
"#,
    );
    let names = &config.names;
    assert_eq!(names.meant("gpt-4o"), ["large"]);
    assert_eq!(names.meant("chat"), ["large", "small", "adapter"]);
    assert!(names.behind("large").eq(["small"]));
    assert_eq!(names.meant("other"), ["other"]);
}

#[test]
fn mistaken_names_of_models_are_all_reported() {
    faults(
        r#"
node.id = 1
[[models]]
name = "a"
aliases = ["b", "x", "*"]
fallback = "b"
[[models]]
name = "b"
aliases = ["x"]
fallback = "c"
[[models]]
name = "c"
fallback = "a"
[[models]]
name = "d"
fallback = "nowhere"
[[models]]
name = "e"
fallback = "s"
[[models]]
name = "*"
aliases = ["any"]
fallback = "a"
[[splits]]
model = "x"
to = [{ model = "a" }]
[[splits]]
model = "s"
to = [{ model = "a", weight = 0 }, { model = "s" }, { model = "y" }]
[[splits]]
model = "s"
to = [{ model = "b", weight = 600 }, { model = "b", weight = 600 }]
[[splits]]
model = "t"
by = "weather"
to = []
"#,
        expect![[r#"
            5:11: models[0].aliases[0] is "b", as is models[1].name (expected each name once among models, aliases and splits)
            5:11: models[0].aliases[2] is "*", which stands for any model (expected a name)
            6:12: models[0].fallback leads back to its own model: "a", "b", "c", "a" (expected fallbacks without a cycle)
            9:11: models[1].aliases[0] is "x", as is models[0].aliases[1] (expected each name once among models, aliases and splits)
            10:12: models[1].fallback leads back to its own model: "b", "c", "a", "b" (expected fallbacks without a cycle)
            13:12: models[2].fallback leads back to its own model: "c", "a", "b", "c" (expected fallbacks without a cycle)
            16:12: models[3].fallback is "nowhere", which is no model of this config (expected the name or an alias of a [[models]] entry, or a model that [[backends]] or [[discovery]] name)
            19:12: models[4].fallback is "s", the split of splits[1].model (expected a model, not a split)
            22:11: models[5].aliases is set for the model "*" (expected aliases of a model with a name)
            23:12: models[5].fallback is set for the model "*" (expected a fallback of a model with a name)
            25:9: splits[0].model is "x", as is models[0].aliases[1] (expected each name once among models, aliases and splits)
            29:31: splits[1].to[0].weight is 0 (expected an integer from 1 to 1000)
            29:46: splits[1].to[1].model is "s", the split of splits[1].model (expected a model, not a split)
            29:63: splits[1].to[2].model is "y", which is no model of this config (expected the name or an alias of a [[models]] entry, or a model that [[backends]] or [[discovery]] name)
            31:9: splits[2].model is "s", as is splits[1].model (expected each name once among models, aliases and splits)
            32:6: the weights of splits[2].to sum to 1200 (expected weights in the same proportion that sum to at most 1000)
            32:48: splits[2].to[1].model is the model "b", as is splits[2].to[0].model (expected each model once, with all its weight)
            35:6: splits[3].by is "weather" (expected "user" or "session" or "request")
            36:6: splits[3].to is empty (expected the models, such as [{ model = "a", weight = 9 }, { model = "b" }])
        "#]],
    );
}

#[test]
fn a_price_is_one_of_a_model_that_serves() {
    faults(
        r#"
node.id = 1
[[models]]
name = "large"
aliases = ["best"]
[[splits]]
model = "chat"
to = [{ model = "large" }]
[[prices]]
name = "large"
[[prices]]
name = "listed-by-an-engine"
[[prices]]
name = "best"
[[prices]]
name = "chat"
[[prices]]
name = "*"
"#,
        expect![[r#"
            14:8: prices[2].name is "best", an alias of "large" (expected "large", the model that serves)
            16:8: prices[3].name is "chat", the split of splits[0].model (expected a price for each of its models)
            18:8: prices[4].name is "*", no model (expected a price for each model)
        "#]],
    );
}

#[test]
fn every_entry_of_a_list_has_its_own_settings() {
    let config = config(
        r#"
node.id = 1
[[models]]
name = "a"
[[splits]]
model = "s"
to = [{ model = "a" }]
[[splits]]
model = "t"
by = "session"
to = [{ model = "a" }]
[[sessions.headers]]
session = "x-one"
[[sessions.headers]]
session = "x-two"
[[discovery]]
kind = "dns"
id = "e"
name = "e:1"
[[discovery]]
kind = "file"
path = "/e.json"
"#,
    );
    let local = &config.file.local;
    let shown = ["splits.s.by", "splits.t.by"].map(|path| local[path].value.clone());
    assert_eq!(shown, ["user", "session"]);
    for path in [
        "sessions.headers.x-one.session",
        "sessions.headers.x-two.session",
    ] {
        assert!(local.contains_key(path), "{path}");
    }
    for path in ["discovery.e.kind", "discovery.file.kind"] {
        assert!(local.contains_key(path), "{path}");
    }
}

#[test]
fn a_model_that_leads_into_a_cycle_of_others_has_no_error() {
    faults(
        r#"
node.id = 1
[[models]]
name = "a"
fallback = "b"
[[models]]
name = "b"
fallback = "a"
[[models]]
name = "c"
fallback = "a"
"#,
        expect![[r#"
            5:12: models[0].fallback leads back to its own model: "a", "b", "a" (expected fallbacks without a cycle)
            8:12: models[1].fallback leads back to its own model: "b", "a", "b" (expected fallbacks without a cycle)
        "#]],
    );
}

#[test]
fn chains_of_fallbacks_are_bounded() {
    let model = |nth: usize| {
        format!(
            "[[models]]\nname = \"m{nth}\"\nfallback = \"m{}\"\n",
            nth + 1
        )
    };
    let chain: String = (0..9).map(model).collect();
    faults(
        &format!("node.id = 1\n{chain}[[models]]\nname = \"m9\"\n"),
        expect![[r#"
            4:12: more than 8 fallbacks follow models[0].fallback (expected at most 8)
        "#]],
    );
}
