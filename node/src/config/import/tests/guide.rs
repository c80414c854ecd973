//! Keeps the tables of docs/guide/moving.md equal to those of the code. Regenerate them with
//! `UPDATE_EXPECT=1 cargo test -p node --lib import`.

use expect_test::expect_file;

use super::super::super::others::shown;
use super::super::super::schema::sections;
use super::rows::is_key;
use super::*;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/moving.md");

fn code(names: &[&str]) -> String {
    let names = names.iter().map(|name| match name.split_once('=') {
        None => format!("`{name}`"),
        Some(_) => format!("`{}`", name.replace('=', "` = `").replace(',', "`, `")),
    });
    names.collect::<Vec<_>>().join(", ")
}

fn table_of(kind: ImportKind) -> String {
    let table = kind.table();
    let mut out = format!(
        "Made from {}.\n\n| theirs | becomes |\n| --- | --- |\n",
        table.source
    );
    for row in &table.rows {
        out.push_str(&format!("| {} | {} |\n", code(&row.names), row.told()));
    }
    for (path, value, why) in &table.implied {
        out.push_str(&format!(
            "| not set | `{} = {value}`: {why} |\n",
            shown(path)
        ));
    }
    out
}

#[test]
fn the_guides_tables_equal_those_of_the_code() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let mut made = page.clone();
    for kind in ImportKind::value_variants() {
        let name = kind.to_possible_value().unwrap();
        let begin = format!("<!-- table of {}, made by a test -->\n", name.get_name());
        let (before, rest) = made.split_once(&begin).expect("the page has the table");
        let (_, after) = rest.split_once("<!-- end -->").expect("the table ends");
        made = format!(
            "{before}{begin}{}{}",
            table_of(*kind),
            format_args!("<!-- end -->{after}")
        );
    }
    expect_file![PAGE].assert_eq(&made);
}

/// Returns the key of ours that a piece of code names; `None` if it names something else.
fn key_of(code: &str) -> Option<String> {
    let code = code.split(" = ").next().unwrap_or(code);
    if let Some((list, key)) = code.strip_prefix("[[").and_then(|it| it.split_once("]] ")) {
        return Some(format!("{list}.{key}"));
    }
    let (section, _) = code.split_once('.')?;
    let mut sections = sections().into_iter();
    let is_ours = sections.any(|it| it.path == section && !it.is_list);
    (is_ours && !code.contains(' ')).then(|| code.to_owned())
}

#[test]
fn the_guides_tables_name_only_keys_that_exist() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let ours = rows.filter_map(|row| row.split(" | ").nth(1));
    let keys: Vec<_> = ours
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .filter_map(key_of)
        .collect();
    assert!(keys.len() > 100, "found only {} keys", keys.len());
    for key in keys {
        assert!(is_key(&key), "{key}");
    }
}
