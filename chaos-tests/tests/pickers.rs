//! Three pickers as real processes behind a stand-in gateway; one is killed in use. Only the
//! requests of its own streams are lost; the others keep picking, and nothing is left over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use chaos_tests::gateway::{GatewayOptions, GatewayRequest, StandInGateway};
use chaos_tests::processes::{ClusterOptions, ProcessCluster, until};
use serde_json::json;

/// Number of clients of each picker.
const CLIENTS: usize = 4;
/// Requests answered before and after the kill, by each running picker.
const ANSWERED: u64 = 30;

/// A failed request: its pinned picker, its start, and the error.
type Failed = (usize, Instant, String);

/// Clients whose gateway asks one picker first.
struct PinnedClients {
    gateway: Arc<StandInGateway>,
    picker: usize,
    answered: AtomicU64,
    is_over: AtomicBool,
}

impl PinnedClients {
    async fn ask(self: Arc<Self>, client: usize) -> Vec<Failed> {
        let mut failed = Vec::new();
        let user = format!("user-{}-{client}", self.picker);
        let mut number = 0_u64;
        while !self.is_over.load(Ordering::Relaxed) {
            number += 1;
            let body = json!({
                "model": "emulated", "stream": true, "max_tokens": 16,
                "prompt": format!("{user} asks for the {}th time. ", number % 8).repeat(20),
            });
            let request = GatewayRequest::post("/v1/completions", &user, &body);
            let began = Instant::now();
            match self.gateway.send(&request.pinned(self.picker)).await {
                Ok(answer) if answer.body.ends_with(b"data: [DONE]\n\n") => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok(answer) => failed.push((self.picker, began, format!("{answer:?}"))),
                Err(error) => failed.push((self.picker, began, format!("{error:#}"))),
            }
        }
        failed
    }

    /// Waits until this many more requests are answered.
    async fn after(&self, more: u64) -> anyhow::Result<()> {
        let answered = || self.answered.load(Ordering::Relaxed);
        let goal = answered() + more;
        until("requests are answered", async || Ok(answered() >= goal)).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_picker_fails_no_request_of_other_pickers() -> anyhow::Result<()> {
    let mut cluster = ProcessCluster::start(ClusterOptions {
        has_pickers: true,
        is_secure: false,
        engine_speed: 20.0,
        ..ClusterOptions::default()
    })
    .await?;
    let pickers = cluster.picker_addrs();
    let gateway = Arc::new(StandInGateway::new(&pickers, GatewayOptions::default()));
    let clients: Vec<_> = (0..pickers.len())
        .map(|picker| {
            Arc::new(PinnedClients {
                gateway: Arc::clone(&gateway),
                picker,
                answered: AtomicU64::new(0),
                is_over: AtomicBool::new(false),
            })
        })
        .collect();
    let asking: Vec<_> = clients
        .iter()
        .flat_map(|pinned| (0..CLIENTS).map(|nth| tokio::spawn(Arc::clone(pinned).ask(nth))))
        .collect();
    for pinned in &clients {
        pinned.after(ANSWERED).await?;
    }
    let leader = cluster.leader().await?;
    cluster.kill(leader)?;
    let killed = Instant::now();
    // The other pickers serve the dead one's clients.
    for pinned in &clients {
        pinned.after(ANSWERED).await?;
    }
    cluster.restart(&[leader]).await?;
    for pinned in &clients {
        pinned.after(ANSWERED).await?;
        pinned.is_over.store(true, Ordering::Relaxed);
    }
    let mut lost = 0;
    for asking in asking {
        for (picker, began, why) in asking.await? {
            assert!(
                picker == leader && began <= killed,
                "picker {picker}: {why}"
            );
            lost += 1;
        }
    }
    assert!(lost <= CLIENTS, "{lost} of {CLIENTS} that were under way");
    cluster.wait_idle().await?;
    cluster.check_digests().await?;
    cluster.stop();
    Ok(())
}
