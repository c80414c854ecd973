//! Drives the scheduler by tokio's clock and delivers each request's progress.
//!
//! The scheduler is behind one short lock. Handlers submit and abort under it, so that a disconnect
//! frees the blocks at once. The driver begins a step, waits for its duration without the lock, and
//! ends it. Steps shorter than the timer's resolution do not add up to a delay: the driver sums the
//! model's time, not the waits.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::task::AtomicWaker;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::events::{FaultKind, Publisher, StepEvents};
use super::lora::LoraSeries;
use super::model::{ComputeJob, EngineStats, Finish, RequestId, RequestProgress, Scheduler};
use super::offload::TierTokens;

/// Maximum lag of the model's time behind the clock that the driver catches up. An engine that got
/// no CPU for longer continues at its normal pace.
const CATCH_UP_MAX: Duration = Duration::from_millis(100);

/// An engine's scheduler with the progress of its requests, shared by handlers and the driver.
#[derive(Debug)]
pub(super) struct DriverCore {
    inner: Mutex<DriverInner>,
    /// Notified when work may have arrived.
    work: Notify,
    /// Number of requests that have not ended.
    open: watch::Sender<u32>,
    speed: f64,
    publisher: Option<Arc<Publisher>>,
    /// Time when the engine last started, in Unix seconds, as the bits of an `f64`.
    started_s: AtomicU64,
}

#[derive(Debug)]
struct DriverInner {
    scheduler: Scheduler,
    progress_slots: HashMap<RequestId, Arc<ProgressSlot>>,
    /// Fault to inject once the engine is idle.
    pending_fault: FaultKind,
    /// History of the adapters in use, for the metrics page.
    lora: LoraSeries,
}

/// Slot in which the driver stores a request's progress for its handler.
#[derive(Debug, Default)]
struct ProgressSlot {
    latest: Mutex<LatestProgress>,
    waker: AtomicWaker,
}

/// Progress of a request, as its handler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct LatestProgress {
    /// Number of output tokens so far.
    pub output_tokens: u32,
    /// Number of prompt tokens found in the cache or fetched; 0 until the prompt is computed.
    pub cached_tokens: u32,
    /// These tokens by tier; `None` if the engine has only the GPU.
    pub by_tier: Option<TierTokens>,
    /// How the request ended; `None` while it runs.
    pub finish: Option<Finish>,
}

/// A request in flight. Dropping it aborts the request if it has not ended.
#[derive(Debug)]
pub(super) struct RequestGuard {
    core: Arc<DriverCore>,
    id: RequestId,
    progress_slot: Arc<ProgressSlot>,
    seen: u32,
}

impl DriverCore {
    /// Creates an idle engine that runs `speed` times as fast as the scheduler's shape states. It
    /// publishes KV events if it has a `publisher`.
    #[must_use]
    pub(super) fn new(
        scheduler: Scheduler,
        speed: f64,
        publisher: Option<Arc<Publisher>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(DriverInner {
                scheduler,
                progress_slots: HashMap::new(),
                pending_fault: FaultKind::Nothing,
                lora: LoraSeries::default(),
            }),
            work: Notify::new(),
            open: watch::Sender::new(0),
            speed,
            publisher,
            started_s: AtomicU64::new(unix_time().as_secs_f64().to_bits()),
        })
    }

    /// Returns the publisher of KV events, if any.
    pub(super) fn publisher(&self) -> Option<&Arc<Publisher>> {
        self.publisher.as_ref()
    }

    /// Returns the time when the engine last started, in Unix seconds.
    #[must_use]
    pub(super) fn started_s(&self) -> f64 {
        f64::from_bits(self.started_s.load(Ordering::Relaxed))
    }

    /// Resets the cache. Returns `false` and does nothing while a request holds a block.
    pub(super) fn reset_cache(&self) -> bool {
        self.lock().scheduler.reset_cache()
    }

    /// Calls `read` on the scheduler while it is locked.
    pub(super) fn look<T>(&self, read: impl FnOnce(&Scheduler) -> T) -> T {
        read(&self.lock().scheduler)
    }

    /// Queues a request, and returns a guard that reports its progress.
    pub(super) fn submit(self: &Arc<Self>, job: ComputeJob) -> RequestGuard {
        let progress_slot = Arc::new(ProgressSlot::default());
        let id = {
            let mut inner = self.lock();
            let id = inner.scheduler.submit(job);
            inner.progress_slots.insert(id, progress_slot.clone());
            self.count_open(&inner);
            id
        };
        self.work.notify_one();
        RequestGuard {
            core: self.clone(),
            id,
            progress_slot,
            seen: 0,
        }
    }

    /// Returns the current counters and gauges.
    #[must_use]
    pub(super) fn stats(&self) -> EngineStats {
        self.lock().scheduler.stats()
    }

    /// Returns the history of the adapters in use.
    pub(super) fn lora_series(&self) -> LoraSeries {
        self.lock().lora.clone()
    }

    /// Returns the maximum number of prompt and output tokens of a request.
    #[must_use]
    pub(super) fn tokens_max(&self) -> u32 {
        self.lock().scheduler.tokens_max()
    }

    /// Returns a watch on the number of requests that have not ended.
    #[must_use]
    pub(super) fn watch_open(&self) -> watch::Receiver<u32> {
        self.open.subscribe()
    }

    /// Runs the model until the future is dropped.
    pub(super) async fn drive(self: Arc<Self>) {
        let mut model_time = Instant::now();
        loop {
            let step = {
                let mut inner = self.lock();
                let step = inner.scheduler.begin_step();
                inner.note_adapters();
                step
            };
            let Some(step) = step else {
                self.work.notified().await;
                model_time = Instant::now();
                continue;
            };
            let now = Instant::now();
            let earliest = now.checked_sub(CATCH_UP_MAX).unwrap_or(now);
            model_time = model_time.max(earliest) + step.div_f64(self.speed);
            if model_time > now {
                tokio::time::sleep_until(model_time).await;
            } else {
                tokio::task::yield_now().await;
            }
            self.finish_step();
        }
    }

    fn finish_step(&self) {
        let mut inner = self.lock();
        let ended = inner.scheduler.finish_step();
        let events = StepEvents {
            blocks: inner.scheduler.take_events(),
            contents: inner.scheduler.take_contents(),
            offloaded: inner.scheduler.take_offload_events(),
        };
        if let Some(publisher) = &self.publisher {
            let fault = publisher.publish(unix_time().as_secs_f64(), events);
            if fault != FaultKind::Nothing {
                inner.pending_fault = fault;
            }
        }
        let found = inner.scheduler.found().to_vec();
        let has_tiers = inner.scheduler.tiers().is_used();
        for (progress, found) in ended.into_iter().zip(found) {
            let progress_slot = if progress.finish.is_some() {
                inner.progress_slots.remove(&progress.id)
            } else {
                inner.progress_slots.get(&progress.id).cloned()
            };
            if let Some(progress_slot) = progress_slot {
                progress_slot.put(progress, has_tiers.then_some(found));
            }
        }
        self.count_open(&inner);
        if inner.pending_fault != FaultKind::Nothing && inner.scheduler.is_idle() {
            self.inject_fault(&mut inner);
        }
    }

    /// Applies the pending fault to the engine, which is idle.
    fn inject_fault(&self, inner: &mut DriverInner) {
        let fault = std::mem::replace(&mut inner.pending_fault, FaultKind::Nothing);
        inner.scheduler.reset_cache();
        if fault == FaultKind::Restart {
            // The new process knows nothing of the old cache.
            drop(inner.scheduler.take_events());
            inner.scheduler.forget_events();
            self.started_s
                .store(unix_time().as_secs_f64().to_bits(), Ordering::Relaxed);
            if let Some(publisher) = &self.publisher {
                publisher.restart();
            }
        }
    }

    fn abort(&self, id: RequestId) {
        let mut inner = self.lock();
        if inner.progress_slots.remove(&id).is_some() {
            inner.scheduler.abort(id);
            self.count_open(&inner);
        }
    }

    fn count_open(&self, inner: &DriverInner) {
        let open = u32::try_from(inner.progress_slots.len()).unwrap_or(u32::MAX);
        self.open
            .send_if_modified(|known| std::mem::replace(known, open) != open);
    }

    fn lock(&self) -> MutexGuard<'_, DriverInner> {
        self.inner
            .lock()
            .expect("no holder of the scheduler panics")
    }
}

impl DriverInner {
    fn note_adapters(&mut self) {
        let (running, waiting) = self.scheduler.adapters();
        self.lora.note(running, waiting, unix_time().as_secs_f64());
    }
}

impl ProgressSlot {
    fn put(&self, progress: RequestProgress, by_tier: Option<TierTokens>) {
        *self.lock() = LatestProgress {
            output_tokens: progress.output_tokens,
            cached_tokens: progress.cached_tokens,
            by_tier,
            finish: progress.finish,
        };
        self.waker.wake();
    }

    fn lock(&self) -> MutexGuard<'_, LatestProgress> {
        self.latest.lock().expect("no holder of an outlet panics")
    }
}

impl RequestGuard {
    /// Polls for new output tokens or the end of the request.
    pub(super) fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LatestProgress> {
        let ticket = self.get_mut();
        ticket.progress_slot.waker.register(cx.waker());
        let latest = *ticket.progress_slot.lock();
        if latest.output_tokens > ticket.seen || latest.finish.is_some() {
            ticket.seen = latest.output_tokens;
            Poll::Ready(latest)
        } else {
            Poll::Pending
        }
    }

    /// Waits until the request has ended, and returns its final progress.
    pub(super) async fn finished(mut self) -> LatestProgress {
        loop {
            let latest = std::future::poll_fn(|cx| Pin::new(&mut self).poll_next(cx)).await;
            if latest.finish.is_some() {
                return latest;
            }
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.core.abort(self.id);
    }
}

/// Returns the time since the Unix epoch.
pub(super) fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
