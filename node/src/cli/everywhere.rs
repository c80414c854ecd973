//! Asks every member of the cluster the same and compares the answers: `explain --everywhere` and
//! `status --verify`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use lab::terminal::{FittedTable, column};
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::decisions;
use super::members::{Member, members};
use super::read::{json_text, thousandths};
use super::table::cell;

/// Maximum number of times that the replicas are asked until they answer at one index.
const TRIES: usize = 20;
/// Pause before the replicas are asked again.
const PAUSE: Duration = Duration::from_millis(25);
/// How many entries ahead of the log its digest is asked for, one attempt after the other: a log that
/// moves has passed its newest index, and one that has come to rest reaches no later one.
const AHEAD: [u64; 6] = [0, 1, 8, 0, 64, 0];

/// A member's answer, or why there is none.
type MemberAnswer = (String, Result<Value, String>);

/// Sends the same request to all members at once.
async fn ask_all(
    members: &[Member],
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Vec<MemberAnswer> {
    let asked = members.iter().map(async |member| {
        let answer = match &member.target {
            Ok(target) => target.send(method.clone(), path, body).await,
            Err(why) => return (member.id.clone(), Err(why.clone())),
        };
        (
            member.id.clone(),
            answer.map_err(|error| format!("{error:#}")),
        )
    });
    join_all(asked).await
}

/// Asks all members until they answer at one log index.
async fn ask_at_one_index(members: &[Member], path: &str, body: &Value) -> Vec<MemberAnswer> {
    let mut answers = ask_all(members, Method::POST, path, Some(body)).await;
    for _ in 1..TRIES {
        if indices(&answers).len() <= 1 {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        answers = ask_all(members, Method::POST, path, Some(body)).await;
    }
    answers
}

fn indices(answers: &[MemberAnswer]) -> BTreeSet<u64> {
    let told = answers
        .iter()
        .filter_map(|(_, answer)| answer.as_ref().ok());
    told.filter_map(|answer| answer["index"].as_u64()).collect()
}

/// Runs `quorate explain --everywhere` with the `request` for the admin API.
pub(super) async fn explain(
    target: &AdminTarget,
    path: &str,
    request: &Value,
    is_json: bool,
) -> anyhow::Result<(String, ExitCode)> {
    let answers = ask_at_one_index(&members(target).await?, path, request).await;
    let compared = ExplanationComparison::of(&answers);
    let code = code(compared.is_alike());
    if !is_json {
        return Ok((compared.text(&answers), code));
    }
    let shown = answers.iter().map(|(id, answer)| match answer {
        Ok(answer) => (id.clone(), answer.clone()),
        Err(why) => (id.clone(), json!({ "error": why })),
    });
    let shown: serde_json::Map<String, Value> = shown.collect();
    let all = json!({
        "is_alike": compared.is_alike(),
        "differences": compared.differences(),
        "replicas": shown,
    });
    Ok((json_text(&all)?, code))
}

fn code(is_alike: bool) -> ExitCode {
    match is_alike {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Replicas that say the same of one thing.
#[derive(Debug, PartialEq, Eq)]
struct AnswerGroup {
    replicas: Vec<String>,
    /// The values as the replicas gave them; cells may round them.
    values: Value,
    cells: Vec<String>,
}

/// What the replicas say of one thing, by groups that say the same.
#[derive(Debug, PartialEq, Eq)]
struct Compared {
    /// Id of a backend; empty for the whole request.
    of: String,
    groups: Vec<AnswerGroup>,
}

impl Compared {
    fn new<'a>(
        of: &str,
        answers: &'a [MemberAnswer],
        said: impl Fn(&'a Value) -> (Value, Vec<String>),
    ) -> Self {
        let mut groups: Vec<AnswerGroup> = Vec::new();
        for (id, answer) in answers {
            let Ok(answer) = answer else { continue };
            let (values, cells) = said(answer);
            match groups.iter_mut().find(|group| group.values == values) {
                Some(group) => group.replicas.push(id.clone()),
                None => groups.push(AnswerGroup {
                    replicas: vec![id.clone()],
                    values,
                    cells,
                }),
            }
        }
        Self {
            of: of.to_owned(),
            groups,
        }
    }

    fn is_alike(&self) -> bool {
        self.groups.len() <= 1
    }

    fn rows(&self) -> impl Iterator<Item = Vec<String>> {
        let mark = if self.is_alike() { "" } else { "*" };
        self.groups.iter().map(move |group| {
            let named = Some(self.of.clone()).filter(|of| !of.is_empty());
            let first = [mark.to_owned()].into_iter().chain(named);
            let replicas = group.replicas.join(", ");
            first.chain([replicas]).chain(group.cells.clone()).collect()
        })
    }
}

/// All that is compared of the replicas' explanations.
struct ExplanationComparison {
    whole: Compared,
    backends: Vec<Compared>,
    /// Members without an answer, and why.
    silent: Vec<(String, String)>,
}

impl ExplanationComparison {
    fn of(answers: &[MemberAnswer]) -> Self {
        let told = || {
            answers
                .iter()
                .filter_map(|(_, answer)| answer.as_ref().ok())
        };
        let listed = |answer: &Value| answer["backends"].as_array().cloned().unwrap_or_default();
        let ids: BTreeSet<String> = told()
            .flat_map(|answer| listed(answer).into_iter().map(|it| cell(&it["id"])))
            .collect();
        let backend = |id: &String| {
            Compared::new(id, answers, |answer| {
                let found = listed(answer).into_iter().find(|it| cell(&it["id"]) == *id);
                let found = found.unwrap_or(Value::Null);
                let told = [&found["verdict"], &found["matched"], &found["score"]];
                let mut cells = told.map(cell);
                cells[2] = decisions::score(&answer["policy"], &found["score"]);
                (json!(told), Vec::from(cells))
            })
        };
        let silent = answers.iter().filter_map(|(id, answer)| {
            let why = answer.as_ref().err()?;
            Some((id.clone(), why.clone()))
        });
        Self {
            whole: Compared::new("", answers, |answer| {
                let admission = &answer["admission"];
                let told = [
                    &answer["choice"],
                    &answer["reason"],
                    &answer["matched"],
                    &answer["refusal"]["code"],
                    &admission["would_wait"],
                    &admission["counter_milli_tokens"],
                ];
                let mut cells = told.map(cell);
                cells[5] = thousandths(&admission["counter_milli_tokens"]);
                (json!(told), Vec::from(cells))
            }),
            backends: ids.iter().map(backend).collect(),
            silent: silent.collect(),
        }
    }

    /// Returns what differs: `request`, or the id of a backend.
    fn differences(&self) -> Vec<String> {
        let all = [&self.whole].into_iter().chain(&self.backends);
        let differing = all.filter(|it| !it.is_alike());
        let named = differing.map(|it| match it.of.as_str() {
            "" => "request".to_owned(),
            id => id.to_owned(),
        });
        named.collect()
    }

    fn is_alike(&self) -> bool {
        self.silent.is_empty() && self.differences().is_empty()
    }

    fn text(&self, answers: &[MemberAnswer]) -> String {
        let mut whole = FittedTable::new(&[
            column(""),
            column("replicas"),
            column("choice"),
            column("reason").rank(2),
            column("matched").number(),
            column("refusal"),
            column("would wait").rank(1),
            column("counter").number().rank(3),
        ]);
        self.whole.rows().for_each(|row| whole.add_row(row));
        let mut backends = FittedTable::new(&[
            column(""),
            column("backend"),
            column("replicas"),
            column("verdict"),
            column("matched").number(),
            column("score").number(),
        ]);
        let rows = self.backends.iter().flat_map(Compared::rows);
        rows.for_each(|row| backends.add_row(row));
        let indices: Vec<String> = indices(answers).iter().map(ToString::to_string).collect();
        let told = answers.len() - self.silent.len();
        let verdict = match self.differences().len() {
            0 => "alike".to_owned(),
            _ => format!(
                "marked * where they differ: {}",
                self.differences().join(", ")
            ),
        };
        let mut lines = vec![format!(
            "{told} of {} replicas at index {}: {verdict}",
            answers.len(),
            indices.join(", "),
        )];
        if indices.len() > 1 {
            lines.push("the log moved on between the answers, which may explain it".to_owned());
        }
        let silent = self.silent.iter();
        lines.extend(silent.map(|(id, why)| format!("replica {id} did not answer: {why}")));
        format!("{}\n\n{whole}\n\n{backends}", lines.join("\n"))
    }
}

/// The digests of all members' states at one log index.
pub(super) struct VerifiedState {
    index: u64,
    digests: Compared,
    silent: Vec<(String, String)>,
}

impl VerifiedState {
    pub(super) fn is_alike(&self) -> bool {
        self.silent.is_empty() && self.digests.is_alike()
    }

    pub(super) fn json(&self) -> Value {
        let groups = self.digests.groups.iter();
        let groups = groups.map(|it| json!({ "digest": it.cells[0], "replicas": it.replicas }));
        let silent = self.silent.iter().map(|(id, why)| (id.clone(), json!(why)));
        json!({
            "index": self.index,
            "is_alike": self.is_alike(),
            "digests": groups.collect::<Vec<_>>(),
            "unanswered": silent.collect::<serde_json::Map<String, Value>>(),
        })
    }

    /// Returns the lines of `quorate status`.
    pub(super) fn lines(&self) -> Vec<String> {
        let verdict = match self.digests.is_alike() {
            true => "equal",
            false => "DIFFERENT",
        };
        let mut lines = vec![format!(
            "verify   states are {verdict} at index {}",
            self.index
        )];
        let groups = self.digests.groups.iter();
        lines.extend(groups.map(|group| {
            let replicas = group.replicas.join(", ");
            format!("         {} on replicas {replicas}", group.cells[0])
        }));
        let silent = self.silent.iter();
        lines
            .extend(silent.map(|(id, why)| format!("         replica {id} did not answer: {why}")));
        lines
    }
}

/// Compares the states of all members at one log index.
pub(super) async fn verify(target: &AdminTarget) -> anyhow::Result<VerifiedState> {
    let members = members(target).await?;
    let mut attempts = AHEAD.into_iter().peekable();
    loop {
        let ahead = attempts.next().unwrap_or(0);
        let now = ask_all(&members, Method::GET, "/admin/v1/digest", None).await;
        let index = indices(&now).last().copied().unwrap_or(0) + ahead;
        let path = format!("/admin/v1/digest?index={index}");
        let told = ask_all(&members, Method::GET, &path, None).await;
        // A member that answers now and not at the index has passed it, or waits for it in vain.
        let is_missed = now
            .iter()
            .zip(&told)
            .any(|((_, now), (_, told))| now.is_ok() && told.is_err());
        if is_missed && attempts.peek().is_some() {
            continue;
        }
        let silent = told
            .iter()
            .filter_map(|(id, answer)| Some((id.clone(), answer.as_ref().err()?.clone())));
        return Ok(VerifiedState {
            index,
            digests: Compared::new("", &told, |answer| {
                (answer["digest"].clone(), vec![cell(&answer["digest"])])
            }),
            silent: silent.collect(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(choice: &str, score: u64) -> Value {
        json!({
            "index": 7, "choice": choice, "policy": {"policy": "cost"},
            "backends": [{"id": "e1", "verdict": "candidate", "score": score}],
        })
    }

    fn answers(each: [Result<Value, String>; 3]) -> Vec<MemberAnswer> {
        let ids = ["1", "2", "3"].map(ToOwned::to_owned);
        ids.into_iter().zip(each).collect()
    }

    #[test]
    fn equal_answers_are_alike() {
        let alike = answers([(); 3].map(|()| Ok(explained("e1", 5))));
        let compared = ExplanationComparison::of(&alike);
        assert!(compared.is_alike());
        let text = compared.text(&alike);
        assert!(
            text.starts_with("3 of 3 replicas at index 7: alike"),
            "{text}"
        );
        assert!(!text.contains('*'), "{text}");
    }

    #[test]
    fn a_replica_that_differs_is_marked() {
        let all = answers([
            Ok(explained("e1", 5)),
            Ok(explained("e1", 5)),
            Ok(explained("e2", 6)),
        ]);
        let compared = ExplanationComparison::of(&all);
        assert!(!compared.is_alike());
        assert_eq!(compared.differences(), ["request", "e1"]);
        let text = compared.text(&all);
        let marked: Vec<&str> = text.lines().filter(|line| line.starts_with('*')).collect();
        assert_eq!(marked.len(), 4, "{text}");
    }

    #[test]
    fn a_silent_replica_is_not_alike() {
        let all = answers([
            Ok(explained("e1", 5)),
            Ok(explained("e1", 5)),
            Err("refused".to_owned()),
        ]);
        let compared = ExplanationComparison::of(&all);
        assert!(!compared.is_alike());
        assert!(
            compared
                .text(&all)
                .contains("replica 3 did not answer: refused")
        );
    }
}
