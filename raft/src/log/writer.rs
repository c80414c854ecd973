//! Writes the log: on one thread, or on a task over a disk in memory.
//!
//! The writer takes all changes that are queued, writes them as one batch with one sync, and only
//! then answers them: the disk's latency is paid once per batch, and never on a Raft task.
//!
//! While the disk has no room for a batch, nothing of it is written and the writer retries: a
//! temporary shortage needs no restart. An error after something was written is final.

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

/// Queued changes; a writer that is further behind makes Raft wait.
const QUEUE_MAX: usize = 1024;
/// Command bytes after which a batch is closed.
const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Pause before a batch is tried again that there was no room for; doubles up to the maximum.
const AGAIN_FIRST: Duration = Duration::from_millis(10);
const AGAIN_MAX: Duration = Duration::from_millis(500);
const PANICKED: &str = "the log's writer panicked";

/// Told when a change is durable.
pub(crate) enum WriteCallback {
    /// Nobody waits.
    Nobody,
    /// openraft's callback.
    Flushed(IOFlushed<Config>),
    /// A call that waits.
    Waiter(oneshot::Sender<io::Result<()>>),
}

/// A change on its way to the disk.
pub(crate) struct WriteOp {
    pub(crate) change: LogChange,
    pub(crate) done: WriteCallback,
}

/// Called before a batch is written, to add to it, and after.
pub(crate) trait WriteObserver: Send + Sync + 'static {
    /// May append changes that ride along.
    fn before(&self, changes: &mut Vec<LogChange>);
    /// The batch is durable.
    fn after(&self, changes: &[LogChange]);
}

/// Hands changes to the disk, in order.
pub(crate) struct LogWriter {
    ops: Mutex<Option<mpsc::Sender<WriteOp>>>,
    /// `None` once it has been joined.
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
    /// Why nothing can be written at present.
    waiting: watch::WatchSender<Option<String>>,
    /// The replica stops: do not wait for room any longer.
    stop: CancellationToken,
    syncs: SyncMeter,
}

impl LogWriter {
    /// Starts a writer where blocking work belongs: on a thread, or on a task.
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

    /// Queues a change. Waits only when the queue is full.
    ///
    /// # Errors
    /// When the log is closed or has failed; `done` is then told as well.
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

    /// How long syncs took so far.
    pub(crate) fn sync_times(&self) -> SyncTimes {
        self.shared.syncs.times()
    }

    /// Why nothing can be written at present.
    pub(crate) fn waiting(&self) -> watch::WatchReceiver<Option<String>> {
        self.shared.waiting.subscribe()
    }

    /// Gives up the batch that waits for room on the disk, and everything after it.
    pub(crate) fn stop_waiting(&self) {
        self.shared.stop.cancel();
    }

    /// Takes no more changes, and waits for a writing task to end.
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

    /// Writes what is queued, stops the thread and closes the disk. Blocks.
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

/// Writes on a thread, whose own runtime lets it wait for room as a task does.
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

/// Writes on a task, as no write blocks.
fn on_task(shared: Arc<WriterShared>, mut queue: mpsc::Receiver<WriteOp>) -> task::JoinHandle<()> {
    tokio::spawn(async move {
        while let Some(op) = queue.recv().await {
            shared.write_batch(op, &mut queue).await;
        }
    })
}

impl WriterShared {
    /// Writes `first` and what is queued behind it, and answers all of it.
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

    /// Whether a batch can begin. A batch that was given up leaves a gap that nothing may follow:
    /// after the first one everything is refused.
    fn has_room_for(&self, changes: &[LogChange]) -> io::Result<bool> {
        let is_given_up = self.stop.is_cancelled() && self.waiting.borrow().is_some();
        let room = match is_given_up {
            true => Err(io::Error::other("stopped while the log waited for room")),
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
                    tracing::warn!(%error, "log is waiting for disk space; it resumes by itself");
                }
                Ok(false)
            }
            Err(error) => self.is_final(Err(error)),
        }
    }

    /// Takes a panic of the disk, such as one inside sled, for an error: what waits for the write is
    /// then answered.
    fn guarded<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let result = catch_unwind(AssertUnwindSafe(work));
        self.is_final(result.unwrap_or_else(|_| Err(io::Error::other(PANICKED))))
    }

    /// After an error of the disk nothing is written any more.
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
                // A waiter that left needs no answer.
                waiter.send(result).ok();
            }
        }
    }
}

/// `first` and what is queued behind it, up to a batch.
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
