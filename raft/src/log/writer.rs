//! The one thread that writes the log; a task over a disk in memory.
//!
//! It takes everything that waits, writes it as one batch with one sync, and only then answers all
//! of it: the disk's latency is paid once per batch however many wait, and never on a Raft task.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use openraft::storage::IOFlushed;
use tokio::sync::{mpsc, oneshot};
use tokio::task;

use super::disk::{Change, Disk};
use super::weight;
use crate::fault::Fault;
use crate::memory::MemoryHandle;
use crate::planted::{self, Bug};
use crate::types::Config;

/// Waiting changes; a writer that is further behind makes Raft wait.
const QUEUE_MAX: usize = 1024;
/// Command bytes after which a batch is closed.
const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
const PANICKED: &str = "the log's writer panicked";

/// Told when a change is durable.
pub(crate) enum Done {
    /// Nobody asked.
    Nobody,
    /// openraft's callback.
    Flushed(IOFlushed<Config>),
    /// A waiting call.
    Waiter(oneshot::Sender<io::Result<()>>),
}

/// A change on its way to the disk.
pub(crate) struct Op {
    pub(crate) change: Change,
    pub(crate) done: Done,
}

/// Called before a batch is written, to add to it, and after.
pub(crate) trait Watch: Send + Sync + 'static {
    /// May append changes that ride along.
    fn before(&self, changes: &mut Vec<Change>);
    /// The batch is durable.
    fn after(&self, changes: &[Change]);
}

/// Hands changes to the disk, in order.
pub(crate) struct Writer {
    ops: Mutex<Option<mpsc::Sender<Op>>>,
    /// Until it is waited for.
    worker: Mutex<Option<Worker>>,
    run: Arc<Run>,
}

enum Worker {
    Thread(thread::JoinHandle<()>),
    Task(task::JoinHandle<()>),
}

struct Run {
    disk: Arc<dyn Disk>,
    watch: Arc<dyn Watch>,
    fault: Fault,
}

impl Writer {
    /// A writer with a thread of its own.
    pub(crate) fn on_thread(
        disk: Arc<dyn Disk>,
        watch: Arc<dyn Watch>,
        fault: Fault,
    ) -> io::Result<Self> {
        let run = Arc::new(Run { disk, watch, fault });
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
        Ok(Self::new(ops, Worker::Thread(thread), run))
    }

    /// A writer with a task of its own, which waits as long as the disk takes.
    pub(crate) fn on_task(disk: Arc<MemoryHandle>, watch: Arc<dyn Watch>, fault: Fault) -> Self {
        let run = Arc::new(Run {
            disk: disk.clone(),
            watch,
            fault,
        });
        let (ops, mut queue) = mpsc::channel(QUEUE_MAX);
        let task = tokio::spawn({
            let run = run.clone();
            async move {
                while let Some(op) = queue.recv().await {
                    let (mut changes, mut done) = gather(op, &mut queue);
                    if planted::is(Bug::AckBeforeFlush) {
                        run.answer(&Ok(()), std::mem::take(&mut done));
                    }
                    let result = run.write_slowly(&disk, &mut changes).await;
                    run.answer(&result, done);
                }
            }
        });
        Self::new(ops, Worker::Task(task), run)
    }

    fn new(ops: mpsc::Sender<Op>, worker: Worker, run: Arc<Run>) -> Self {
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
    pub(crate) async fn submit(&self, op: Op) -> io::Result<()> {
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

    /// Takes nothing more; a task that writes has ended afterwards.
    pub(crate) async fn finish(&self) {
        drop(lock(&self.ops).take());
        let task = {
            let mut worker = lock(&self.worker);
            match worker.take() {
                Some(Worker::Task(task)) => Some(task),
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
        drop(lock(&self.ops).take());
        let worker = lock(&self.worker).take();
        if let Some(Worker::Thread(thread)) = worker
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

impl Run {
    fn write(&self, changes: &mut Vec<Change>) -> io::Result<()> {
        self.begin(changes)?;
        catch_unwind(AssertUnwindSafe(|| self.disk.write(changes)))
            .unwrap_or_else(|_| Err(io::Error::other("the disk's writer panicked")))?;
        self.watch.after(changes);
        Ok(())
    }

    async fn write_slowly(&self, disk: &MemoryHandle, changes: &mut Vec<Change>) -> io::Result<()> {
        self.begin(changes)?;
        disk.write_unsynced(changes)?;
        let time = disk.sync_time()?;
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        }
        disk.sync_log()?;
        self.watch.after(changes);
        Ok(())
    }

    fn begin(&self, changes: &mut Vec<Change>) -> io::Result<()> {
        if let Some(fault) = self.fault.get() {
            return Err(io::Error::other(fault));
        }
        self.watch.before(changes);
        Ok(())
    }

    fn answer(&self, result: &io::Result<()>, done: Vec<Done>) {
        if let Err(error) = result {
            self.fault.set(format!("log: {error}"));
        }
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

impl Done {
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
fn gather(first: Op, queue: &mut mpsc::Receiver<Op>) -> (Vec<Change>, Vec<Done>) {
    let mut bytes = bytes_of(&first.change);
    let (mut changes, mut done) = (vec![first.change], vec![first.done]);
    while bytes < BATCH_BYTES_MAX
        && let Ok(op) = queue.try_recv()
    {
        bytes += bytes_of(&op.change);
        changes.push(op.change);
        done.push(op.done);
    }
    (changes, done)
}

fn bytes_of(change: &Change) -> usize {
    match change {
        Change::Append(entries) => entries.iter().map(weight).sum(),
        Change::Vote(_) | Change::Committed(_) | Change::Truncate { .. } | Change::Purge { .. } => {
            0
        }
    }
}
