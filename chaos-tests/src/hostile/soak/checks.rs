//! Checks that must hold after the load of a soak.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use comfy_table::Table;
use tokio::time::{Instant, sleep};

use super::kinds::{ClientKind, TOKENS};
use super::{KindCounts, SoakPhase, SoakReport};
use crate::hostile::record::ComputedRequest;
use crate::processes::client_ledger::UserTotals;
use crate::processes::figures::ProcessFigures;
use crate::processes::load::charged;
use crate::processes::{ProcessCluster, until};
use crate::terminal::table;

/// Time within which every replica must be ready after the load.
const READY: Duration = Duration::from_secs(2);
/// Minimum service of honest users in the storm, in permille of their service alone.
const HONEST_PERMILLE: f64 = 900.0;
/// Minimum service of the worst served honest user, in permille of that of the best served.
const EVEN_PERMILLE: u64 = 800;
/// Minimum share of the output for impatient users that they read to the end, in permille.
const READ_PERMILLE: u64 = 800;
/// Time after its client's departure for which a request may still reach an engine.
const DEPARTED: Duration = Duration::from_secs(1);
/// Maximum error of the charges to users who leave, in permille of the computed tokens.
const CHARGED_OFF_PERMILLE: u64 = 150;
/// Maximum growth of a replica's memory, in bytes.
const GROWN_BYTES_MAX: u64 = 96 << 20;
/// Maximum growth of a replica's number of open descriptors.
const GROWN_DESCRIPTORS_MAX: u64 = 64;

/// Result of one check.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SoakCheck {
    /// Name of the check.
    pub name: &'static str,
    /// Description of what the check found.
    pub found: String,
    /// Description of the violation; `None` if the check holds.
    pub violation: Option<String>,
}

impl SoakCheck {
    /// Returns whether all checks hold.
    #[must_use]
    pub fn all_hold(checks: &[Self]) -> bool {
        checks.iter().all(|check| check.violation.is_none())
    }

    /// Formats checks as a table.
    #[must_use]
    pub fn table(checks: &[Self]) -> Table {
        let mut rows = table(&["check", "", "found"]);
        for check in checks {
            let (held, found) = match &check.violation {
                None => ("held", &check.found),
                Some(why) => ("VIOLATED", why),
            };
            rows.add_row([check.name, held, found]);
        }
        rows
    }

    pub(super) fn new(name: &'static str, result: anyhow::Result<String>) -> Self {
        match result {
            Ok(found) => Self {
                name,
                found,
                violation: None,
            },
            Err(error) => Self {
                name,
                found: String::new(),
                violation: Some(format!("{error:#}")),
            },
        }
    }
}

/// Measurements of a soak that are to be checked.
pub(super) struct JudgedPhases {
    pub(super) alone: SoakPhase,
    pub(super) storm: SoakPhase,
    pub(super) before: ProcessFigures,
    pub(super) capacity: f64,
}

impl JudgedPhases {
    /// Runs all checks and returns the report.
    pub(super) async fn judge(&self, cluster: &ProcessCluster) -> SoakReport {
        // The order matters: readiness is measured from the end of the load.
        let mut checks = vec![SoakCheck::new(
            "every replica is ready within 2 s",
            ready(cluster).await,
        )];
        let newcomers = super::users::newcomers(&self.storm.scene).await;
        checks.push(SoakCheck::new("newcomers are served within 2 s", newcomers));
        checks.push(SoakCheck::new(
            "nothing is in flight",
            at_rest(cluster).await,
        ));
        let one_digest = cluster.check_digests().await;
        checks.push(SoakCheck::new(
            "one digest at one index",
            one_digest.map(|()| String::new()),
        ));
        checks.push(SoakCheck::new(
            "counters are what was computed",
            self.counters(cluster).await,
        ));
        checks.push(SoakCheck::new(
            "honest users get what they got alone",
            self.honest_goodput(),
        ));
        checks.push(SoakCheck::new("honest users get alike", self.even()));
        checks.push(SoakCheck::new(
            "engines work for those who stay",
            self.read_to_the_end(),
        ));
        checks.push(SoakCheck::new(
            "who left is not computed for",
            self.departed(),
        ));
        checks.push(SoakCheck::new("nothing runs twice", self.once()));
        checks.push(SoakCheck::new("no attack worked", self.harm()));
        checks.push(SoakCheck::new(
            "memory and descriptors as before",
            self.figures(cluster).await,
        ));
        let kinds = ClientKind::ALL
            .iter()
            .map(|kind| (*kind, self.storm.scene.book(*kind).clone()));
        SoakReport {
            capacity: self.capacity,
            honest: [rate(&self.alone), rate(&self.storm)],
            kinds: kinds.filter(|(_, tally)| tally.asked > 0).collect(),
            checks,
        }
    }

    fn honest_goodput(&self) -> anyhow::Result<String> {
        let (alone, storm) = (rate(&self.alone), rate(&self.storm));
        let permille = 1000.0 * storm / alone;
        ensure!(
            permille >= HONEST_PERMILLE,
            "{storm:.2} answers a second of {alone:.2}"
        );
        Ok(format!("{storm:.2} answers a second of {alone:.2}"))
    }

    /// Checks that every honest user got about the same share of its requests served.
    fn even(&self) -> anyhow::Result<String> {
        let book = self.storm.scene.book(ClientKind::Honest);
        let part = |user: &String| {
            let [asked, whole] = book.by_user.get(user).copied().unwrap_or_default();
            1000 * whole / asked.max(1)
        };
        let users = ClientKind::Honest.users();
        let least = users.iter().map(part).min().unwrap_or(0);
        let most = users.iter().map(part).max().unwrap_or(0);
        let found = format!("{least} to {most} thousandths of what each asked for");
        ensure!(1000 * least >= EVEN_PERMILLE * most, "{found}");
        Ok(found)
    }

    /// Checks that impatient users read most of the output for them to the end. They must be
    /// rejected immediately or served in time.
    fn read_to_the_end(&self) -> anyhow::Result<String> {
        let scene = &self.storm.scene;
        if scene.book(ClientKind::Impatient).asked == 0 {
            return Ok("nobody was impatient".to_owned());
        }
        let (mut made, mut read) = (0, 0);
        let not_whole = scene.not_whole.lock().expect("nobody panics with it");
        for (id, computed) in &scene.ledger.computed() {
            if kind_of(id) == Some(ClientKind::Impatient) {
                made += computed.output;
                read += if not_whole.contains_key(id) {
                    0
                } else {
                    computed.output
                };
            }
        }
        ensure!(
            made > 0 && 1000 * read >= READ_PERMILLE * made,
            "of {made} tokens for impatient users {read} were read to their end"
        );
        Ok(format!("{read} of {made} tokens"))
    }

    fn departed(&self) -> anyhow::Result<String> {
        let scene = &self.storm.scene;
        let not_whole = scene.not_whole.lock().expect("nobody panics with it");
        let ledger = scene.ledger.computed();
        let late = not_whole.iter().filter(|(id, left)| {
            let computed = ledger.get(*id);
            let began = computed.and_then(|it| it.began);
            began.is_some_and(|began| began > **left + DEPARTED)
        });
        let late: Vec<&String> = late.map(|(id, _)| id).collect();
        ensure!(
            late.is_empty(),
            "{} requests began after their client had left: {:?}",
            late.len(),
            &late[..late.len().min(5)]
        );
        Ok(format!("{} were left", not_whole.len()))
    }

    /// Checks that replicas do not resend a request that broke its engine.
    fn once(&self) -> anyhow::Result<String> {
        let ledger = self.storm.scene.ledger.computed();
        let twice = |(id, computed): &(&String, &ComputedRequest)| {
            // A request that the engine refused may be tried elsewhere.
            computed.runs > 1 && kind_of(id) != Some(ClientKind::Failing)
        };
        let twice = ledger.iter().filter(twice).count();
        ensure!(
            twice == 0,
            "{twice} of {} requests ran more than once",
            ledger.len()
        );
        Ok(format!("{} requests", ledger.len()))
    }

    fn harm(&self) -> anyhow::Result<String> {
        let mut worked = Vec::new();
        for kind in ClientKind::ALL {
            let book = self.storm.scene.book(*kind);
            worked.extend(
                book.harm
                    .iter()
                    .map(|(what, times)| format!("{what} ({times} times)")),
            );
        }
        ensure!(worked.is_empty(), "{}", worked.join("; "));
        Ok(String::new())
    }

    async fn figures(&self, cluster: &ProcessCluster) -> anyhow::Result<String> {
        // Connections that stay open are closed after their idle timeout.
        let after = ProcessFigures::of(cluster).await?;
        let before = self.before;
        let found = format!(
            "{} MiB and {} descriptors, before {} MiB and {}",
            after.rss_bytes >> 20,
            after.descriptors,
            before.rss_bytes >> 20,
            before.descriptors,
        );
        ensure!(
            after.rss_bytes <= before.rss_bytes + GROWN_BYTES_MAX
                && after.descriptors <= before.descriptors + GROWN_DESCRIPTORS_MAX,
            "{found}"
        );
        Ok(found)
    }

    /// Checks that users are charged what engines computed: exactly if they read to the end,
    /// otherwise approximately.
    async fn counters(&self, cluster: &ProcessCluster) -> anyhow::Result<String> {
        let mut computed: BTreeMap<String, ComputedRequest> = BTreeMap::new();
        for (id, one) in &self.storm.scene.ledger.computed() {
            let user = id.rsplit_once('.').map_or(id.as_str(), |(user, _)| user);
            let sum = computed.entry(user.to_owned()).or_default();
            sum.seen += one.seen;
            sum.prompt += one.prompt;
            sum.output += one.output;
            sum.runs += one.runs;
        }
        let charged = settled(cluster).await?;
        let mut wrong = Vec::new();
        for (user, computed) in &computed {
            let found = charged.get(user).copied().unwrap_or_default();
            let kind = kind_of(user).context("a user of no kind")?;
            let prompts = found.uncached + found.cached;
            let is_right = if kind.is_exact() && !self.has_left(user) {
                prompts == computed.prompt && found.output == computed.output
            } else {
                is_between(prompts, computed.prompt, computed.seen)
                    && is_between(found.output, computed.output, output_max(kind, computed))
            };
            if !is_right {
                wrong.push(format!(
                    "{user}: {prompts} + {} of {} + {}",
                    found.output, computed.prompt, computed.output
                ));
            }
        }
        ensure!(
            wrong.is_empty(),
            "charged, of what was computed, prompts and output: {}",
            wrong.join("; ")
        );
        Ok(format!("{} users", computed.len()))
    }

    /// Returns whether a request of the user was cut short after an engine had begun with it.
    fn has_left(&self, user: &str) -> bool {
        [&self.alone, &self.storm].into_iter().any(|phase| {
            let ledger = phase.scene.ledger.computed();
            let not_whole = phase.scene.not_whole.lock().expect("nobody panics with it");
            let mut left = not_whole.keys();
            left.any(|id| id.starts_with(user) && ledger.contains_key(id))
        })
    }
}

/// Returns the maximum number of output tokens that users of this kind may be charged. Where an
/// engine failed, its output is unknown, and at most the usual length of such responses is charged.
fn output_max(kind: ClientKind, computed: &ComputedRequest) -> u64 {
    match kind {
        ClientKind::Poison | ClientKind::Failing => {
            computed.output + TOKENS * u64::from(computed.runs)
        }
        _ => computed.output,
    }
}

fn is_between(found: u64, least: u64, most: u64) -> bool {
    let off = |of: u64| CHARGED_OFF_PERMILLE * of.max(1000) / 1000;
    found + off(least) >= least && found <= most + off(most)
}

/// Returns the kind of client that a request or user name belongs to.
fn kind_of(name: &str) -> Option<ClientKind> {
    ClientKind::named(name.split_once('-')?.0).ok()
}

/// Returns the number of complete responses to honest users per second.
fn rate(phase: &SoakPhase) -> f64 {
    let book: KindCounts = phase.scene.book(ClientKind::Honest).clone();
    book.whole as f64 / phase.counted.as_secs_f64()
}

pub(super) async fn ready(cluster: &ProcessCluster) -> anyhow::Result<String> {
    let began = Instant::now();
    let mut waits_for = cluster.up();
    loop {
        let mut left = Vec::new();
        for number in waits_for {
            let answer = cluster.get(number, "/readyz").await;
            if !answer.as_ref().is_ok_and(|it| it["status"] == "ready") {
                left.push((number, answer));
            }
        }
        if left.is_empty() {
            return Ok(format!("{} ms", began.elapsed().as_millis()));
        }
        ensure!(began.elapsed() < READY, "not ready: {left:?}");
        waits_for = left.into_iter().map(|(number, _)| number).collect();
        sleep(Duration::from_millis(20)).await;
    }
}

async fn at_rest(cluster: &ProcessCluster) -> anyhow::Result<String> {
    let began = Instant::now();
    for number in cluster.up() {
        cluster.wait_ready(number).await?;
    }
    cluster.wait_idle().await?;
    Ok(format!("{} ms", began.elapsed().as_millis()))
}

/// Returns the users' counters once they no longer change.
async fn settled(cluster: &ProcessCluster) -> anyhow::Result<BTreeMap<String, UserTotals>> {
    let last = std::cell::RefCell::new(BTreeMap::new());
    let same = std::cell::Cell::new(0);
    until("counters are settled", async || {
        let now = charged(cluster, 0).await?;
        let is_same = *last.borrow() == now;
        same.set(if is_same { same.get() + 1 } else { 0 });
        last.replace(now);
        Ok(same.get() >= 20)
    })
    .await?;
    Ok(last.into_inner())
}
