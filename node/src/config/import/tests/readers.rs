//! Tests of the readers: which settings they find, and how they refuse a file.

use super::super::source::Setting;
use super::super::words;
use super::*;

fn settings(found: &[Setting]) -> Vec<String> {
    let shown = |it: &Setting| format!("{} {} {:?}", it.line, it.name, it.values);
    found.iter().map(shown).collect()
}

#[test]
fn scripts_are_split_as_a_shell_does() {
    let script = "# a comment --port 1
A=1 /opt/bin/smg --a 'b c' --d=e\\ f \\
   --g h # rest
true && smg --i | tee --append log; smg --j >log --k
python -m other --l
";
    let found = words::script(script, &["smg"]).unwrap();
    assert_eq!(
        settings(&found.settings),
        [
            "2 --a [\"b c\"]",
            "2 --d [\"e f\"]",
            "3 --g [\"h\"]",
            "4 --i []",
            "4 --j []",
            "4 --k []",
        ]
    );
    let unread = ["`tee`, another command", "`python`, another command"];
    let unread: Vec<_> = [4, 5].into_iter().zip(unread.map(str::to_owned)).collect();
    assert_eq!(found.unread, unread);
}

#[test]
fn a_file_may_be_flags_alone() {
    let found = words::script("--a 1\n\n--b 2 3\n", &["smg"]).unwrap();
    assert_eq!(
        settings(&found.settings),
        ["1 --a [\"1\"]", "3 --b [\"2\", \"3\"]"]
    );
}

#[test]
fn containers_are_found_by_their_program_or_image() {
    let yaml = "services:
  router:
    image: lmsys/smg:1
    command: --a 1 --b
  other:
    image: vllm
    command: [vllm, serve, --c]
  shell:
    command: [sh, -c, \"smg launch --d 2\"]
  alias: &alias {command: [smg, --e]}
  aliased: *alias
";
    let found = words::containers(yaml, &["smg"]).unwrap();
    assert_eq!(
        settings(&found.settings),
        ["4 --a [\"1\"]", "4 --b []", "9 --d [\"2\"]", "10 --e []"]
    );
    assert_eq!(
        found.unread,
        [
            (6, "a container of another program".to_owned()),
            (11, "an alias of YAML".to_owned()),
        ]
    );
    let found = words::containers("- --a\n- '1'\n", &["smg"]).unwrap();
    assert_eq!(settings(&found.settings), ["1 --a [\"1\"]"]);
}

#[test]
fn environments_are_found_in_lists_and_maps() {
    let yaml = "a:
  env:
  - name: X_A
    value: 1
  - name: X_B
  environment: [X_C=2]
b:
  envs: {X_D: 3}
---
data:
  X_E: 4
  a-file.yaml: b
";
    let found = words::environments(yaml, &["smg"]).unwrap();
    assert_eq!(
        settings(&found.settings),
        [
            "3 X_A [\"1\"]",
            "5 X_B [\"$\"]",
            "6 X_C [\"2\"]",
            "8 X_D [\"3\"]",
            "11 X_E [\"4\"]",
        ]
    );
    let found = words::env_file("# a\nexport X_A='1 2'\n\nX_B=\n").unwrap();
    assert_eq!(
        settings(&found.settings),
        ["2 X_A [\"1 2\"]", "4 X_B [\"\"]"]
    );
}

#[test]
fn weights_become_integers_together() {
    let profile = |weights: [&str; 2]| {
        format!(
            "kind: EndpointPickerConfig\nplugins:\n- type: prefix-cache-scorer\n- type: \
             queue-scorer\nschedulingProfiles:\n- plugins:\n  - {{pluginRef: \
             prefix-cache-scorer, weight: {}}}\n  - {{pluginRef: queue-scorer, weight: {}}}\n",
            weights[0], weights[1]
        )
    };
    for (weights, ours) in [(["2.0", "1"], [2, 1]), (["0.25", "1"], [25, 100])] {
        let config = imported(ImportKind::Epp, "epp.yaml", &profile(weights)).config;
        for (key, weight) in ["prefix", "queue"].iter().zip(ours) {
            let line = format!("{key}_weight = {weight} ");
            assert!(config.contains(&line), "{line} in {config}");
        }
        assert!(config.contains("kv_weight = 0 "), "{config}");
    }
}

#[test]
fn standard_input_is_yaml_if_it_looks_so() {
    for text in ["# a\n---\nargs: [smg, --a]", "args: [smg, --a]", "- --a"] {
        let found = ImportKind::Smg.read("-", text).unwrap();
        assert_eq!(settings(&found.settings).len(), 1, "{text}");
    }
    for text in ["smg --a", "#!/bin/sh\n\nsmg --a", "--a"] {
        let found = ImportKind::Smg.read("-", text).unwrap();
        assert_eq!(settings(&found.settings).len(), 1, "{text}");
    }
}

#[test]
fn settings_from_elsewhere_are_reported() {
    let told = |kind, name: &str, text: &str, what: &str| {
        let config = imported(kind, name, text).config;
        let (_, unread) = config.split_once("# Not read:").unwrap_or((&config, ""));
        assert!(unread.contains(what), "{what} in {config}");
    };
    let smg = |text, what| told(ImportKind::Smg, "a.sh", text, what);
    smg("smg $ARGS --port 1", "a.sh:1: words filled in elsewhere");
    smg("smg --port 1 2", "--port: values after the first one");
    smg("smg --log-json 1 SECRET", "--log-json: values after");
    let env = "env: {AIBRIX_X: 1}\n";
    for (text, what) in [
        ("envFrom: [{secretRef: a}]\n", "a.yaml:2: `envFrom`, "),
        ("stringData: {A: b}\n", "a.yaml:2: `stringData`, "),
        ("kind: Secret\ndata: {A: b}\n", "a.yaml:3: `data`, "),
        ("a: &a {b: c}\nd: {<<: *a}\n", "a.yaml:3: an alias"),
    ] {
        told(ImportKind::Aibrix, "a.yaml", &format!("{env}{text}"), what);
    }
    let config = imported(
        ImportKind::Aibrix,
        "a.yaml",
        "environment: [AIBRIX_GRPC_X]\n",
    )
    .config;
    assert!(
        config.contains("a.yaml:1 AIBRIX_GRPC_X: not known"),
        "{config}"
    );
}

#[test]
fn without_profiles_each_scorer_has_weight_one() {
    let head = "kind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n- type: \
                prefix-cache-scorer\n- type: random-picker\n";
    for profiles in ["", "schedulingProfiles: []\n"] {
        let text = format!("{head}{profiles}");
        let config = imported(ImportKind::Epp, "epp.yaml", &text).config;
        for line in [
            "\nprefix_weight = 1 ",
            "\nqueue_weight = 1 ",
            "\nkv_weight = 0 ",
            "\npolicy = \"random\" ",
        ] {
            assert!(config.contains(line), "{line} in {config}");
        }
    }
}

#[test]
fn a_picker_counts_if_a_profile_takes_it() {
    let config = |pickers: &str| {
        let text = format!(
            "kind: EndpointPickerConfig\nplugins:\n- type: max-score-picker\n- type: \
             random-picker\n  name: r\nschedulingProfiles:\n- plugins: [{pickers}]\n  extra: 1\n"
        );
        imported(ImportKind::Epp, "epp.yaml", &text).config
    };
    let unused = config("{pluginRef: max-score-picker}");
    assert!(unused.contains("policy = \"epp\""), "{unused}");
    let told = "# Not read:\n# - epp.yaml:4: `random-picker`, which no profile refers to\n";
    assert!(unused.contains(told), "{unused}");
    assert!(
        unused.contains("schedulingProfiles.extra: not known"),
        "{unused}"
    );
    let used = config("{pluginRef: r}");
    assert!(used.contains("policy = \"random\""), "{used}");
}

#[test]
fn a_bad_file_is_refused_at_its_line() {
    refused(
        ImportKind::Smg,
        "a.sh",
        "smg \\\n  --port 'x\n",
        expect![[r#"
            error: a quote that is not closed
             --> a.sh:2:1
              |
            2 |
              | ^ expected a closing quote on the same line

            a.sh: 1 fault
        "#]],
    );
    let deep = format!("a: {}", "[".repeat(70));
    let faults = [
        (ImportKind::Smg, "a.sh", "smg --port\n"),
        (ImportKind::Smg, "a.sh", "smg --queue-size many\n"),
        (
            ImportKind::Smg,
            "a.sh",
            "smg --port 1\nsmg --log-json maybe\n",
        ),
        (ImportKind::VllmRouter, "a.sh", "ls\n"),
        (ImportKind::VllmRouter, "a.yml", "a: [b\n"),
        (ImportKind::Aibrix, "a.env", "A=1\nb\n"),
        (ImportKind::Aibrix, "a.env", "A-B=1\n"),
        (ImportKind::Aibrix, "a.yml", "env:\n  A: 1\n  A: 2\n"),
        (ImportKind::Epp, "a.yaml", "kind: Pod\n"),
        (ImportKind::Epp, "a.yaml", &deep),
        (
            ImportKind::Epp,
            "a.yaml",
            "kind: EndpointPickerConfig\nplugins:\n- name: x\n",
        ),
        (
            ImportKind::Epp,
            "a.yaml",
            "kind: EndpointPickerConfig\nplugins: {a: b}\n",
        ),
    ];
    let faults = faults.map(|(kind, name, text)| {
        let errors = import_texts(kind, &[(name.to_owned(), text.to_owned())]);
        let errors = errors.expect_err("the file must be refused");
        let [error] = &*errors.errors else {
            panic!("several errors: {errors}");
        };
        let Place::File(span) = &error.place else {
            panic!("no place: {errors}");
        };
        let (line, told) = (errors.line(span.start), &error.message);
        format!("{line}: {told} (expected {})\n", error.expected)
    });
    expect![[r#"
        a.sh:1:1: --port has no value (expected a value)
        a.sh:1:1: --queue-size is "many" (expected a number)
        a.sh:2:1: --log-json is "maybe" (expected true or false)
        a.sh:1:1: no setting is in the file (expected a command with `vllm-router`, flags alone, or a container in a file named *.yaml)
        a.yml:2:1: while parsing a flow sequence, expected ',' or ']' (expected valid YAML)
        a.env:2:1: a line without `=` (expected NAME=VALUE, a comment, or Kubernetes YAML in a file named *.yaml)
        a.env:1:1: no name of a variable (expected NAME=VALUE, a comment, or Kubernetes YAML in a file named *.yaml)
        a.yml:3:1: `A` is set twice (expected each key once)
        a.yaml:1:1: no EndpointPickerConfig is in the file (expected YAML with `kind: EndpointPickerConfig`, also within a ConfigMap)
        a.yaml:1:1: YAML nested more than 64 deep (expected less nesting)
        a.yaml:3:1: a plugin has no type (expected `type` with the plugin's type)
        a.yaml:2:1: `plugins` is not a list (expected a list, each entry behind a `-`)
    "#]].assert_eq(&faults.concat());
}
