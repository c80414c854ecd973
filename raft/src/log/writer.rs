//! Writes the log, on a thread or, for a disk in memory, on a task.
//!
//! The writer takes all queued changes, writes them as one batch with one sync, and then
//! acknowledges them. Disk latency is paid once per batch and never on a Raft task.
//!
//! While the disk has no space for a batch, the writer writes none of it and retries, so a
//! temporary shortage needs no restart. An error after anything was written is final.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use openraft::storage::IOFlushed;
use tokio::sync::{mpsc, oneshot};
use tokio::task;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::disk::{Disk, LogChange};
use super::sync_times::{SyncMeter, SyncTimes};
use crate::backoff::Backoff;
use crate::determinism::blocking::BlockingMode;
use crate::determinism::watch;
use crate::fault::FatalError;
use crate::files::is_shortage;
use crate::locks::lock;
use crate::planted::{self, Bug};
use crate::types::Config;

/// Maximum number of queued changes. When the queue is full, Raft waits.
const QUEUE_MAX: usize = 1024;
/// Number of command bytes after which a batch is closed.
const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// First pause before retrying a batch that had no space; doubles up to the maximum.
const AGAIN_FIRST: Duration = Duration::from_millis(10);
const AGAIN_MAX: Duration = Duration::from_millis(500);
const PANICKED: &str = "the log's writer panicked";

/// Receiver of a change's result, once the change is durable or has failed.
pub(crate) enum WriteCallback {
    /// No receiver.
    Nobody,
    /// Callback from openraft.
    Flushed(IOFlushed<Config>),
    /// Channel to a caller that waits.
    Waiter(oneshot::Sender<io::Result<()>>),
}

/// Change on its way to the disk, with the receiver of its result.
pub(crate) struct WriteOp {
    pub(crate) change: LogChange,
    pub(crate) done: WriteCallback,
}

/// Observer that is called before and after a batch is written.
pub(crate) trait WriteObserver: Send + Sync + 'static {
    /// Called before a batch is written. May append changes to the batch.
    fn before(&self, changes: &mut Vec<LogChange>);
    /// Called when the batch, which consists of `changes`, is durable.
    fn after(&self, changes: &[LogChange]);
}

/// Writer that passes changes to the disk, in order.
pub(crate) struct LogWriter {
    ops: Mutex<Option<mpsc::Sender<WriteOp>>>,
    /// Thread or task that writes; `None` after it was joined.
    worker: Mutex<Option<WriterTask>>,
    shared: Arc<WriterShared>,
}

enum WriterTask {
    Thread(thread::JoinHandle<()>),
    Task(task::JoinHandle<()>),
}

struct WriterShared {
    disk: Arc<dyn Disk>,
    watch: Arc<dyn WriteObserver>,
    fault: FatalError,
    /// Reason why nothing can currently be written; `None` if writing is possible.
    waiting: watch::WatchSender<Option<String>>,
    /// Cancelled when the replica stops: ends the wait for disk space.
    stop: CancellationToken,
    syncs: SyncMeter,
}

impl LogWriter {
    /// Starts a writer on a thread or a task, depending on `blocking`.
    pub(crate) fn start(
        disk: Arc<dyn Disk>,
        watch: Arc<dyn WriteObserver>,
        fault: FatalError,
        blocking: BlockingMode,
    ) -> io::Result<Self> {
        let shared = Arc::new(WriterShared {
            disk,
            watch,
            fault,
            waiting: watch::WatchSender::new(None),
            stop: CancellationToken::new(),
            syncs: SyncMeter::default(),
        });
        let (ops, queue) = mpsc::channel(QUEUE_MAX);
        let worker = match blocking {
            BlockingMode::Pool => WriterTask::Thread(on_thread(shared.clone(), queue)?),
            BlockingMode::InPlace => WriterTask::Task(on_task(shared.clone(), queue)),
        };
        Ok(Self {
            ops: Mutex::new(Some(ops)),
            worker: Mutex::new(Some(worker)),
            shared,
        })
    }

    /// Queues a change. Waits only if the queue is full.
    ///
    /// # Errors
    /// Fails if the log is closed or has failed; `done` then receives the error too.
    pub(crate) async fn submit(&self, op: WriteOp) -> io::Result<()> {
        let ops = lock(&self.ops).clone();
        let closed = || io::Error::other("the log is closed");
        let Some(ops) = ops else {
            op.done.tell(Err(closed()));
            return Err(closed());
        };
        ops.send(op).await.map_err(|unsent| {
            unsent.0.done.tell(Err(closed()));
            closed()
        })
    }

    /// Returns the durations of the syncs so far.
    pub(crate) fn sync_times(&self) -> SyncTimes {
        self.shared.syncs.times()
    }

    /// Watches why nothing can currently be written; `None` if writing is possible.
    pub(crate) fn waiting(&self) -> watch::WatchReceiver<Option<String>> {
        self.shared.waiting.subscribe()
    }

    /// Gives up the batch that waits for disk space, and everything after it.
    pub(crate) fn stop_waiting(&self) {
        self.shared.stop.cancel();
    }

    /// Stops accepting changes and waits for a writer task to end.
    pub(crate) async fn finish(&self) {
        self.stop_waiting();
        drop(lock(&self.ops).take());
        let task = {
            let mut worker = lock(&self.worker);
            match worker.take() {
                Some(WriterTask::Task(task)) => Some(task),
                other => {
                    *worker = other;
                    None
                }
            }
        };
        if let Some(task) = task
            && task.await.is_err()
        {
            self.shared.fault.set(PANICKED);
        }
    }

    /// Writes all queued changes, stops the thread and closes the disk. Blocks.
    pub(crate) fn close(&self) {
        self.stop_waiting();
        drop(lock(&self.ops).take());
        let worker = lock(&self.worker).take();
        if let Some(WriterTask::Thread(thread)) = worker
            && thread.join().is_err()
        {
            self.shared.fault.set(PANICKED);
        }
        self.shared.disk.close();
    }
}

/// Starts a writer on a thread. The thread's own runtime lets it wait for space as a task does.
fn on_thread(
    shared: Arc<WriterShared>,
    mut queue: mpsc::Receiver<WriteOp>,
) -> io::Result<thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    thread::Builder::new()
        .name("raft-log".into())
        .spawn(move || {
            while let Some(op) = queue.blocking_recv() {
                runtime.block_on(shared.write_batch(op, &mut queue));
            }
        })
}

/// Starts a writer on a task. Only for a disk whose writes do not block.
fn on_task(shared: Arc<WriterShared>, mut queue: mpsc::Receiver<WriteOp>) -> task::JoinHandle<()> {
    tokio::spawn(async move {
        while let Some(op) = queue.recv().await {
            shared.write_batch(op, &mut queue).await;
        }
    })
}

impl WriterShared {
    /// Writes `first` and the changes queued behind it as one batch, and acknowledges them.
    async fn write_batch(&self, first: WriteOp, queue: &mut mpsc::Receiver<WriteOp>) {
        let (mut changes, mut done) = gather(first, queue);
        if planted::is(Bug::AckBeforeFlush) {
            answer(&Ok(()), std::mem::take(&mut done));
        }
        let result = self.write(&mut changes).await;
        answer(&result, done);
    }

    async fn write(&self, changes: &mut Vec<LogChange>) -> io::Result<()> {
        self.refuse_if_failed()?;
        let mut backoff = Backoff::new(AGAIN_FIRST, AGAIN_MAX);
        while !self.has_room_for(changes)? {
            backoff.pause(&self.stop).await;
        }
        self.watch.before(changes);
        self.guarded(|| self.disk.write(changes))?;
        let began = Instant::now();
        let delay = self.guarded(|| self.disk.sync_delay())?;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        self.guarded(|| self.disk.sync())?;
        self.syncs.observe(began.elapsed());
        self.watch.after(changes);
        Ok(())
    }

    fn refuse_if_failed(&self) -> io::Result<()> {
        match self.fault.get() {
            Some(fault) => Err(io::Error::other(fault)),
            None => Ok(()),
        }
    }

    /// Whether the batch, which consists of `changes`, can begin. A batch that was given up leaves
    /// a gap that nothing may follow, so everything after it is refused.
    fn has_room_for(&self, changes: &[LogChange]) -> io::Result<bool> {
        let is_given_up = self.stop.is_cancelled() && self.waiting.borrow().is_some();
        let room = match is_given_up {
            true => Err(io::Error::other(
                "stopped while the log waited for disk space",
            )),
            false => self.disk.room_for(changes),
        };
        match room {
            Ok(()) => {
                if self.waiting.send_replace(None).is_some() {
                    tracing::info!("log resumed: the disk has space again");
                }
                Ok(true)
            }
            Err(error) if is_given_up => Err(error),
            Err(error) if is_shortage(&error) => {
                if self.waiting.send_replace(Some(error.to_string())).is_none() {
                    tracing::warn!(%error, "log is waiting for disk space; it resumes automatically");
                }
                Ok(false)
            }
            Err(error) => self.is_final(Err(error)),
        }
    }

    /// Runs `work` and turns a panic, such as one inside sled, into an error, so that the callers
    /// waiting for the write get an answer.
    fn guarded<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let result = catch_unwind(AssertUnwindSafe(work));
        self.is_final(result.unwrap_or_else(|_| Err(io::Error::other(PANICKED))))
    }

    /// Returns `result`, and records an error as fatal, after which nothing more is written.
    fn is_final<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| self.fault.set(format!("log: {error}")))
    }
}

fn answer(result: &io::Result<()>, done: Vec<WriteCallback>) {
    for done in done {
        // An `io::Error` cannot be cloned.
        let result = result.as_ref().copied();
        done.tell(result.map_err(|error| io::Error::new(error.kind(), error.to_string())));
    }
}

impl WriteCallback {
    fn tell(self, result: io::Result<()>) {
        match self {
            Self::Nobody => {}
            Self::Flushed(flushed) => flushed.io_completed(result),
            Self::Waiter(waiter) => {
                // The waiter may have gone.
                waiter.send(result).ok();
            }
        }
    }
}

/// Takes `first` and the changes queued behind it, up to the batch limit.
fn gather(
    first: WriteOp,
    queue: &mut mpsc::Receiver<WriteOp>,
) -> (Vec<LogChange>, Vec<WriteCallback>) {
    let mut bytes = first.change.weight();
    let (mut changes, mut done) = (vec![first.change], vec![first.done]);
    while bytes < BATCH_BYTES_MAX
        && let Ok(op) = queue.try_recv()
    {
        bytes += op.change.weight();
        changes.push(op.change);
        done.push(op.done);
    }
    (changes, done)
}
