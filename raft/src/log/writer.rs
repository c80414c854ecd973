//! The one thread that writes the log.
//!
//! It takes everything that waits, writes it as one batch with one sync, and only then answers all
//! of it: the disk's latency is paid once per batch however many wait, and never on a Raft task.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use openraft::storage::IOFlushed;
use tokio::sync::{mpsc, oneshot};

use super::disk::{Change, Disk};
use super::weight;
use crate::fault::Fault;
use crate::types::Config;

/// Waiting changes; a writer that is further behind makes Raft wait.
const QUEUE_MAX: usize = 1024;
/// Command bytes after which a batch is closed.
const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;

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
    way: Way,
    run: Arc<Run>,
}

enum Way {
    /// Through a thread of its own.
    Thread {
        ops: Mutex<Option<mpsc::Sender<Op>>>,
        thread: Mutex<Option<JoinHandle<()>>>,
    },
    /// On the caller's task: for a disk that never blocks, and the same order in every run.
    Inline,
}

struct Run {
    disk: Arc<dyn Disk>,
    watch: Arc<dyn Watch>,
    fault: Fault,
}

impl Writer {
    /// A writer with its own thread.
    pub(crate) fn threaded(
        disk: Arc<dyn Disk>,
        watch: Arc<dyn Watch>,
        fault: Fault,
    ) -> io::Result<Self> {
        let run = Arc::new(Run { disk, watch, fault });
        let (ops, mut queue) = mpsc::channel(QUEUE_MAX);
        let thread = std::thread::Builder::new().name("raft-log".into()).spawn({
            let run = run.clone();
            move || {
                while let Some(op) = queue.blocking_recv() {
                    run.run(gather(op, &mut queue));
                }
            }
        })?;
        let way = Way::Thread {
            ops: Mutex::new(Some(ops)),
            thread: Mutex::new(Some(thread)),
        };
        Ok(Self { way, run })
    }

    /// A writer without one.
    pub(crate) fn inline(disk: Arc<dyn Disk>, watch: Arc<dyn Watch>, fault: Fault) -> Self {
        Self {
            way: Way::Inline,
            run: Arc::new(Run { disk, watch, fault }),
        }
    }

    /// Queues a change. Waits only when the queue is full.
    ///
    /// # Errors
    /// When the log is closed or has failed; `done` is then told as well.
    pub(crate) async fn submit(&self, op: Op) -> io::Result<()> {
        match &self.way {
            Way::Inline => {
                self.run.run(vec![op]);
                Ok(())
            }
            Way::Thread { ops, .. } => {
                let ops = ops.lock().unwrap_or_else(PoisonError::into_inner).clone();
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
        }
    }

    /// Writes what waits, stops the thread and closes the disk. Blocks.
    pub(crate) fn close(&self) {
        if let Way::Thread { ops, thread } = &self.way {
            drop(ops.lock().unwrap_or_else(PoisonError::into_inner).take());
            let thread = thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread
                && thread.join().is_err()
            {
                self.run.fault.set("the log's writer panicked");
            }
        }
        self.run.disk.close();
    }
}

impl Run {
    fn run(&self, ops: Vec<Op>) {
        let (mut changes, done): (Vec<Change>, Vec<Done>) =
            ops.into_iter().map(|op| (op.change, op.done)).unzip();
        let result = self.write(&mut changes);
        if let Err(error) = &result {
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

    fn write(&self, changes: &mut Vec<Change>) -> io::Result<()> {
        if let Some(fault) = self.fault.get() {
            return Err(io::Error::other(fault));
        }
        self.watch.before(changes);
        catch_unwind(AssertUnwindSafe(|| self.disk.write(changes)))
            .unwrap_or_else(|_| Err(io::Error::other("the disk's writer panicked")))?;
        self.watch.after(changes);
        Ok(())
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

fn gather(first: Op, queue: &mut mpsc::Receiver<Op>) -> Vec<Op> {
    let mut bytes = bytes_of(&first.change);
    let mut ops = vec![first];
    while bytes < BATCH_BYTES_MAX
        && let Ok(op) = queue.try_recv()
    {
        bytes += bytes_of(&op.change);
        ops.push(op);
    }
    ops
}

fn bytes_of(change: &Change) -> usize {
    match change {
        Change::Append(entries) => entries.iter().map(weight).sum(),
        Change::Vote(_) | Change::Committed(_) | Change::Truncate { .. } | Change::Purge { .. } => {
            0
        }
    }
}
