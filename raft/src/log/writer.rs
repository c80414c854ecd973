//! The one thread that writes the log; a task over a disk in memory.
//!
//! It takes everything that waits, writes it as one batch with one sync, and only then answers all
//! of it: the disk's latency is paid once per batch however many wait, and never on a Raft task.
//!
//! While the disk has no room for a batch nothing of it is written, and it is tried again: a want
//! that may pass costs no restart. An error after something was written is final.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use openraft::storage::IOFlushed;
use tokio::sync::{mpsc, oneshot};
use tokio::task;
use tokio_util::sync::CancellationToken;

use super::disk::{Disk, LogChange, TimedDisk};
use crate::determinism::watch;
use crate::fault::FatalError;
use crate::files::is_shortage;
use crate::planted::{self, Bug};
use crate::types::Config;

/// Waiting changes; a writer that is further behind makes Raft wait.
const QUEUE_MAX: usize = 1024;
/// Command bytes after which a batch is closed.
const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Wait before a batch is tried again that there is no room for; doubled each time up to the maximum.
const AGAIN_FIRST: Duration = Duration::from_millis(10);
const AGAIN_MAX: Duration = Duration::from_millis(500);
const PANICKED: &str = "the log's writer panicked";

/// Told when a change is durable.
pub(crate) enum WriteCallback {
    /// Nobody asked.
    Nobody,
    /// openraft's callback.
    Flushed(IOFlushed<Config>),
    /// A waiting call.
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
    /// Until it is waited for.
    worker: Mutex<Option<WriterTask>>,
    run: Arc<WriterShared>,
}

enum WriterTask {
    Thread(thread::JoinHandle<()>),
    Task(task::JoinHandle<()>),
}

struct WriterShared {
    disk: Arc<dyn Disk>,
    watch: Arc<dyn WriteObserver>,
    fault: FatalError,
    /// Why the disk takes nothing at present.
    waiting: watch::WatchSender<Option<String>>,
    /// The replica stops: room is waited for no more.
    stop: CancellationToken,
}

impl LogWriter {
    /// A writer with a thread of its own.
    pub(crate) fn on_thread(
        disk: Arc<dyn Disk>,
        watch: Arc<dyn WriteObserver>,
        fault: FatalError,
    ) -> io::Result<Self> {
        let run = Arc::new(WriterShared::new(disk, watch, fault));
        let (ops, mut queue) = mpsc::channel(QUEUE_MAX);
        let thread = thread::Builder::new().name("raft-log".into()).spawn({
            let run = run.clone();
            move || {
                while let Some(op) = queue.blocking_recv() {
                    let (mut changes, done) = gather(op, &mut queue);
                    let result = run.write(&mut changes);
                    run.answer(&result, done);
                }
            }
        })?;
        Ok(Self::new(ops, WriterTask::Thread(thread), run))
    }

    /// A writer with a task of its own, which waits as long as the disk takes.
    pub(crate) fn on_task(
        disk: Arc<impl TimedDisk>,
        watch: Arc<dyn WriteObserver>,
        fault: FatalError,
    ) -> Self {
        let run = Arc::new(WriterShared::new(disk.clone(), watch, fault));
        let (ops, mut queue) = mpsc::channel(QUEUE_MAX);
        let task = tokio::spawn({
            let run = run.clone();
            async move {
                while let Some(op) = queue.recv().await {
                    let (mut changes, mut done) = gather(op, &mut queue);
                    if planted::is(Bug::AckBeforeFlush) {
                        run.answer(&Ok(()), std::mem::take(&mut done));
                    }
                    let result = run.write_slowly(&*disk, &mut changes).await;
                    run.answer(&result, done);
                }
            }
        });
        Self::new(ops, WriterTask::Task(task), run)
    }

    fn new(ops: mpsc::Sender<WriteOp>, worker: WriterTask, run: Arc<WriterShared>) -> Self {
        Self {
            ops: Mutex::new(Some(ops)),
            worker: Mutex::new(Some(worker)),
            run,
        }
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

    /// Why the disk takes nothing at present.
    pub(crate) fn waiting(&self) -> watch::WatchReceiver<Option<String>> {
        self.run.waiting.subscribe()
    }

    /// Gives up what waits for room on the disk, and everything after it.
    pub(crate) fn stop_waiting(&self) {
        self.run.stop.cancel();
        if let Some(WriterTask::Thread(thread)) = &*lock(&self.worker) {
            thread.thread().unpark();
        }
    }

    /// Takes nothing more; a task that writes has ended afterwards.
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
            self.run.fault.set(PANICKED);
        }
    }

    /// Writes what waits, stops the thread and closes the disk. Blocks.
    pub(crate) fn close(&self) {
        self.stop_waiting();
        drop(lock(&self.ops).take());
        let worker = lock(&self.worker).take();
        if let Some(WriterTask::Thread(thread)) = worker
            && thread.join().is_err()
        {
            self.run.fault.set(PANICKED);
        }
        self.run.disk.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WriterShared {
    fn new(disk: Arc<dyn Disk>, watch: Arc<dyn WriteObserver>, fault: FatalError) -> Self {
        Self {
            disk,
            watch,
            fault,
            waiting: watch::WatchSender::new(None),
            stop: CancellationToken::new(),
        }
    }

    fn write(&self, changes: &mut Vec<LogChange>) -> io::Result<()> {
        self.refuse_if_failed()?;
        let mut wait = AGAIN_FIRST;
        while !self.has_room_for(changes)? {
            thread::park_timeout(wait);
            wait = (wait * 2).min(AGAIN_MAX);
        }
        self.watch.before(changes);
        let written = catch_unwind(AssertUnwindSafe(|| self.disk.write(changes)))
            .unwrap_or_else(|_| Err(io::Error::other("the disk's writer panicked")));
        self.is_final(written)?;
        self.watch.after(changes);
        Ok(())
    }

    async fn write_slowly(
        &self,
        disk: &impl TimedDisk,
        changes: &mut Vec<LogChange>,
    ) -> io::Result<()> {
        self.refuse_if_failed()?;
        let mut wait = AGAIN_FIRST;
        while !self.has_room_for(changes)? {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(wait) => {}
            }
            wait = (wait * 2).min(AGAIN_MAX);
        }
        self.watch.before(changes);
        self.is_final(disk.write_unsynced(changes))?;
        let time = self.is_final(disk.sync_time())?;
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        }
        self.is_final(disk.sync())?;
        self.watch.after(changes);
        Ok(())
    }

    fn refuse_if_failed(&self) -> io::Result<()> {
        match self.fault.get() {
            Some(fault) => Err(io::Error::other(fault)),
            None => Ok(()),
        }
    }

    /// Whether a batch can be begun. What was given up once leaves a gap that nothing may follow:
    /// after the first refusal at a stop everything is refused.
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

    /// Nothing is written after an error of the disk.
    fn is_final<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| self.fault.set(format!("log: {error}")))
    }

    fn answer(&self, result: &io::Result<()>, done: Vec<WriteCallback>) {
        for done in done {
            // An `io::Error` cannot be cloned.
            done.tell(
                result
                    .as_ref()
                    .copied()
                    .map_err(|e| io::Error::new(e.kind(), e.to_string())),
            );
        }
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

/// What waits, up to a batch.
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
