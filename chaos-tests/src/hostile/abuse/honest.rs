//! A well-behaved client that runs beside an attack.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::time::{Instant, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::context::{chat, outcome};
use crate::hostile::client;
use crate::processes::access::ClientAccess;

/// Minimum time from one request to the next.
const PAUSE: Duration = Duration::from_millis(50);
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 1);
/// Maximum wait for a response that takes the engine no time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Results of the honest client's requests.
#[derive(Debug, Clone, Default)]
pub(super) struct HonestCounts {
    pub(super) answered: u64,
    pub(super) longest: Duration,
    /// First request that failed.
    pub(super) failure: Option<String>,
}

/// A client that sends requests to every replica in turn until it is stopped.
pub(super) struct HonestClient {
    stop: CancellationToken,
    asking: AbortOnDropHandle<HonestCounts>,
}

impl HonestClient {
    pub(super) fn start(data: Vec<SocketAddr>, access: ClientAccess) -> Self {
        let stop = CancellationToken::new();
        let asking = tokio::spawn(ask(Arc::from(data), access, stop.clone()));
        Self {
            stop,
            asking: AbortOnDropHandle::new(asking),
        }
    }

    pub(super) async fn stop(self) -> anyhow::Result<HonestCounts> {
        self.stop.cancel();
        Ok(self.asking.await?)
    }
}

async fn ask(
    data: Arc<[SocketAddr]>,
    access: ClientAccess,
    stop: CancellationToken,
) -> HonestCounts {
    let mut counts = HonestCounts::default();
    let mut ticks = interval(PAUSE);
    for (number, to) in (0_u64..).zip(data.iter().cycle()) {
        if stop.run_until_cancelled(ticks.tick()).await.is_none() {
            break;
        }
        let began = Instant::now();
        let once = async || {
            let asked = chat("modest", &format!("plain.honest-{number}"), false);
            outcome(client::ask(&access, FROM, *to, asked)).await
        };
        // Like any client, it sends again if the connection was closed before an answer.
        let asking = async {
            match once().await {
                (None, _) => once().await,
                answered => answered,
            }
        };
        let (status, text) = timeout(PATIENCE, asking)
            .await
            .unwrap_or((None, "no response in time".to_owned()));
        counts.longest = counts.longest.max(began.elapsed());
        match status {
            Some(StatusCode::OK) => counts.answered += 1,
            _ => {
                let told = format!("{to}: {status:?} {text}");
                counts.failure.get_or_insert(told);
            }
        }
    }
    counts
}
