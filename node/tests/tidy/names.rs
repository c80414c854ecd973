//! Names of tests: a short sentence of the subject and what is expected of it.

use super::check;

/// Words that hide the subject of a test, or that have a plainer equivalent.
const AVOIDED: [&str; 8] = [
    "asked", "befalls", "nobody", "somebody", "told", "whatever", "whoever", "whom",
];

/// Words that a name does not begin with: it begins with its subject.
const AVOIDED_FIRST: [&str; 2] = ["what", "who"];

/// Maximum length of a name, in bytes.
const NAME_BYTES_MAX: usize = 70;

/// Returns the names of the functions below a `#[test]`, `#[tokio::test]` or the like.
fn tests(text: &str) -> impl Iterator<Item = &str> {
    let mut is_test = false;
    text.lines().map(str::trim_start).filter_map(move |line| {
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.contains("::test");
            return None;
        }
        let (_, name) = line.split_once("fn ")?;
        std::mem::take(&mut is_test).then(|| name.split('(').next().unwrap_or(name))
    })
}

fn fault(name: &str) -> Option<&'static str> {
    let words: Vec<_> = name.split('_').collect();
    if name.len() > NAME_BYTES_MAX {
        return Some("is too long");
    }
    let opens_with = AVOIDED_FIRST.contains(&words[0]) && words.get(1) != Some(&"if");
    (opens_with || words.iter().any(|word| AVOIDED.contains(word)))
        .then_some("does not name its subject plainly")
}

#[test]
fn test_names_state_subject_and_expectation() {
    check("names of tests", |_, text| {
        let name = tests(text).find(|name| fault(name).is_some())?;
        Some(format!("{name} {}", fault(name)?))
    });
}

#[test]
fn unclear_test_names_are_found() {
    let text = "#[tokio::test]\nasync fn what_is_given_is_kept() {\n#[test]\nfn a_sum_is_told() {\n\
                fn who_helps() {\n#[test]\nfn what_if_is_validated() {";
    let faults: Vec<_> = tests(text).map(|name| fault(name).is_some()).collect();
    assert_eq!(faults, [true, true, false]);
    assert!(fault(&"x".repeat(NAME_BYTES_MAX + 1)).is_some());
}
