//! The table of `quorate engine-check` results matches the recorded responses:
//! `docs/guide/engines.md` and `node/tests/shared/engine-check`.

use serde_json::Value;

use super::root;

/// Recorded responses in the order of the table's columns: heading and file.
const ENGINES: [(&str, &str); 4] = [
    ("vLLM 0.32.0, CPU", "vllm-0.32.json"),
    ("vLLM 0.12.0, CPU", "vllm-0.12.json"),
    ("llama.cpp", "llama.cpp.json"),
    ("Dynamo 1.6.1, frontend and mocker", "dynamo-mocker.json"),
];

fn recorded(file: &str) -> Value {
    let path = root().join("node/tests/shared/engine-check").join(file);
    let text = std::fs::read_to_string(path).expect("read a recorded answer");
    serde_json::from_str(&text).expect("answers are JSON")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("it is text")
}

/// Returns a check's cell in the table.
fn cell(check: &Value) -> String {
    let (outcome, found) = (text(&check["outcome"]), text(&check["found"]));
    match found.contains(['{', '<', '*', '_', '|']) {
        true => format!("{outcome}: `{}`", found.replace('|', "\\|")),
        false => format!("{outcome}: {found}"),
    }
}

fn table() -> String {
    let answers = ENGINES.map(|(_, file)| recorded(file));
    let headings: Vec<_> = ENGINES.iter().map(|(heading, _)| *heading).collect();
    let mut table = format!("| check | {} |\n", headings.join(" | "));
    table += &format!("| --- {}|\n", "| --- ".repeat(ENGINES.len()));
    let checks = |answer: &Value| answer["checks"].as_array().expect("checks").clone();
    let names: Vec<Value> = checks(&answers[0])
        .iter()
        .map(|it| it["name"].clone())
        .collect();
    for name in &names {
        let cells = answers.iter().map(|answer| {
            let checks = checks(answer);
            let check = checks.iter().find(|check| check["name"] == *name);
            check.map_or_else(String::new, cell)
        });
        let cells: Vec<_> = cells.collect();
        table += &format!("| `{}` | {} |\n", text(name), cells.join(" | "));
    }
    table
}

#[test]
fn the_engines_table_matches_the_recorded_findings() {
    let page = std::fs::read_to_string(root().join("docs/guide/engines.md"));
    let page = page.expect("read the guide");
    let table = table();
    assert!(
        page.contains(&table),
        "docs/guide/engines.md has to hold this table:\n\n{table}"
    );
}
