//! Fresh starts: how soon a new cluster follows engines exactly that have published many KV events.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;

use super::engines::Engine;
use super::{RowReport, Scene, is_exact};
use crate::processes::until;

/// Number of starts.
const STARTS: u64 = 20;
/// Number of messages that each engine has published before. The socket on which vLLM up to 0.32
/// and SGLang replay them drops some after about a thousand.
const MESSAGES: u64 = 5_000;
/// Maximum time from the readiness of the replicas to exactness.
const IN_TIME: Duration = Duration::from_secs(5);
/// Number of words of a prompt, which needs at least one block of at most 64 tokens.
const PROMPT_WORDS: u64 = 70;

impl Scene<'_> {
    /// Starts clusters, each with empty stores, until all engines are followed exactly.
    pub(super) async fn start_often(&self, engines: &[Engine]) -> anyhow::Result<RowReport> {
        try_join_all(engines.iter().map(|engine| self.publish(engine))).await?;
        let mut report = RowReport::default();
        let begin = Instant::now();
        for number in 1..=STARTS {
            let cluster = self.start_cluster(engines).await?;
            let ready = Instant::now();
            let mut became_exact = Ok(());
            for replica in 0..cluster.replicas() {
                let exact = until("exact", async || is_exact(&cluster, replica).await).await;
                became_exact = became_exact.and(exact);
            }
            let took = ready.elapsed();
            report.requests += 1;
            let is_in_time = became_exact.is_ok() && took <= IN_TIME;
            report.equal += u64::from(is_in_time);
            report.near += u64::from(became_exact.is_ok());
            eprintln!(
                "  start {number}: {:.1} s, {became_exact:?}",
                took.as_secs_f64()
            );
            cluster.stop();
        }
        report.took_s = begin.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Lets an engine publish messages, one prompt after another, because it joins the events of
    /// one step in one message.
    async fn publish(&self, engine: &Engine) -> anyhow::Result<()> {
        for number in 0..MESSAGES {
            let words: Vec<String> = (0..PROMPT_WORDS)
                .map(|word| (number * PROMPT_WORDS + word).to_string())
                .collect();
            let prompt = words.join(" ");
            engine
                .complete(self.starter.http, &self.facts.model, &prompt)
                .await?;
        }
        Ok(())
    }
}
