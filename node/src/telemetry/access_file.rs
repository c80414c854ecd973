//! Writes the access log to a separate file.
//!
//! A thread behind a bounded queue writes it, so no request waits for a disk, a pipe or a hanging
//! file system. Lines that find no room or cannot be written are counted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use rustix::fs::OFlags;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of queued lines.
const LINES_MAX: usize = 8192;
/// Maximum length of all queued lines, in bytes. It is needed because clients choose the model
/// names.
const WAITING_BYTES_MAX: usize = 8 << 20;
/// Length from which on a batch of queued lines is written, in bytes.
const WRITE_BYTES: usize = 64 << 10;
/// Minimum interval between two log lines about lost lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum time that the process waits for queued lines when it ends.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// Requirements on the setting `access_file`, for error messages.
pub(crate) const ACCESS_FILE_EXPECTED: &str =
    "a writable file, or a pipe with a reader, in an existing folder";

/// The file of the access log, with the thread that writes it. Clones share both.
#[derive(Clone)]
pub struct AccessFile {
    path: PathBuf,
    shared: Arc<SharedFile>,
    messages: SyncSender<Message>,
}

#[derive(Default)]
struct SharedFile {
    /// File that was opened last; `None` once the thread has taken it.
    reopened: Mutex<Option<File>>,
    waiting_bytes: AtomicUsize,
    /// Number of lines dropped from a full queue that have not been reported yet.
    unreported_drops: AtomicU64,
    metrics: AccessFileMetrics,
}

enum Message {
    /// Asks the thread to write this line, which includes its line break.
    Line(Vec<u8>),
    /// Asks the thread to take the reopened file.
    Reopened,
    /// Asks the thread to respond once everything queued before is written.
    Flush(SyncSender<()>),
}

/// Metrics of the access log's file.
#[derive(Debug, Clone, Default)]
pub struct AccessFileMetrics {
    dropped: Family<DroppedLineLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DroppedLineLabels {
    reason: &'static str,
}

const QUEUE_FULL: &str = "queue-full";
const WRITE_FAILED: &str = "write-failed";

impl AccessFileMetrics {
    /// Adds the metrics to `registry` as `quorate_access_log_...`.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "quorate_access_log_lines_dropped",
            "Lines missing from the access log's file: too many waited, or a write failed",
            self.dropped.clone(),
        );
        for reason in [QUEUE_FULL, WRITE_FAILED] {
            // Both series must exist from the start.
            drop(self.dropped.get_or_create(&DroppedLineLabels { reason }));
        }
    }

    fn drop_lines(&self, reason: &'static str, lines: u64) {
        let dropped = self.dropped.get_or_create(&DroppedLineLabels { reason });
        dropped.inc_by(lines);
    }
}

impl AccessFile {
    /// Opens the file and starts the thread that appends to it.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        let (messages, waiting) = sync_channel(LINES_MAX);
        let shared = Arc::new(SharedFile::default());
        let thread = WriterThread {
            path: path.to_owned(),
            is_torn: is_cut(path),
            file,
            shared: Arc::clone(&shared),
            losses: Losses::default(),
        };
        let builder = thread::Builder::new().name("access-log".to_owned());
        builder.spawn(move || thread.run(&waiting))?;
        Ok(Self {
            path: path.to_owned(),
            shared,
            messages,
        })
    }

    /// Opens the path again, which may name another file by now, and writes further lines there.
    /// May block.
    ///
    /// # Errors
    /// Fails if the file cannot be opened; lines then still go to the old one.
    pub fn reopen(&self) -> io::Result<()> {
        let file = open(&self.path)?;
        *self.shared.reopened() = Some(file);
        // If the queue is full, the thread is busy and checks for a new file before its next write.
        self.messages.try_send(Message::Reopened).ok();
        Ok(())
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metrics of this file.
    #[must_use]
    pub fn metrics(&self) -> AccessFileMetrics {
        self.shared.metrics.clone()
    }

    /// Waits at most two seconds until all lines sent before are written.
    pub fn flush(&self) {
        let (done, is_done) = sync_channel(1);
        let messages = self.messages.clone();
        // The queue may stay full forever.
        let asking = move || messages.send(Message::Flush(done)).is_ok();
        let builder = thread::Builder::new().name("access-flush".to_owned());
        if builder.spawn(asking).is_err() || is_done.recv_timeout(FLUSH_MAX).is_err() {
            let path = self.path.display();
            tracing::warn!(%path, "could not write the end of the access log");
        }
    }

    fn send(&self, line: &[u8]) {
        let shared = &self.shared;
        let before = shared
            .waiting_bytes
            .fetch_add(line.len(), Ordering::Relaxed);
        let has_room = before.saturating_add(line.len()) <= WAITING_BYTES_MAX;
        let sent = match has_room {
            true => self.messages.try_send(Message::Line(line.to_vec())),
            false => Err(TrySendError::Full(Message::Reopened)),
        };
        if sent.is_err() {
            shared
                .waiting_bytes
                .fetch_sub(line.len(), Ordering::Relaxed);
            shared.unreported_drops.fetch_add(1, Ordering::Relaxed);
            shared.metrics.drop_lines(QUEUE_FULL, 1);
        }
    }
}

impl SharedFile {
    fn reopened(&self) -> std::sync::MutexGuard<'_, Option<File>> {
        // The value is only ever replaced as a whole, so a poisoned lock is harmless.
        self.reopened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a file for appending and creates it if necessary. Fails for a pipe without a reader,
/// because waiting for one would delay the start.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Whether an existing file ends within a line, after a full disk or a power failure.
fn is_cut(path: &Path) -> bool {
    let last = || {
        let file = File::open(path)?;
        let mut last = [b'\n'];
        let bytes = file.metadata()?.len();
        file.read_exact_at(&mut last, bytes.saturating_sub(1))?;
        io::Result::Ok(last[0] != b'\n')
    };
    // A pipe has no last byte, and opening it for reading would steal data from its reader.
    path.is_file() && last().unwrap_or(false)
}

/// Writer that sends one line to the file. `tracing` writes each line in one call.
pub struct LineWriter<'a>(&'a AccessFile);

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.send(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for AccessFile {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        LineWriter(self)
    }
}

/// State of the thread that writes the file.
struct WriterThread {
    path: PathBuf,
    file: File,
    /// Whether the file ends within a line, because a write failed.
    is_torn: bool,
    shared: Arc<SharedFile>,
    losses: Losses,
}

/// Counts of lines that could not be written and have not been reported yet.
#[derive(Default)]
struct Losses {
    lines: u64,
    error: Option<io::Error>,
    reported_at: Option<Instant>,
}

impl WriterThread {
    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(first) = messages.recv() {
            let (lines, flushed) = batch(first, messages);
            let shared = &self.shared;
            shared
                .waiting_bytes
                .fetch_sub(lines.len(), Ordering::Relaxed);
            if let Some(file) = shared.reopened().take() {
                (self.file, self.is_torn) = (file, is_cut(&self.path));
            }
            if let Err(error) = self.write(&lines) {
                self.losses.error = Some(error);
            }
            self.report_losses();
            if let Some(done) = flushed {
                // The caller may have stopped waiting.
                done.send(()).ok();
            }
        }
    }

    /// Writes whole lines. Counts those that could not be written, and returns the last error.
    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut rest = lines;
        let outcome = self.write_rest(&mut rest);
        let lost = rest.iter().filter(|&&byte| byte == b'\n').count() as u64;
        if lost > 0 {
            self.losses.lines += lost;
            self.shared.metrics.drop_lines(WRITE_FAILED, lost);
        }
        outcome
    }

    fn write_rest(&mut self, rest: &mut &[u8]) -> io::Result<()> {
        if self.is_torn && !rest.is_empty() {
            // This ends the torn line, so that the next one stays intact.
            self.file.write_all(b"\n")?;
            self.is_torn = false;
        }
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    self.is_torn = rest[bytes - 1] != b'\n';
                    *rest = &rest[bytes..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Logs how many lines were lost, at most once per [`REPORT_INTERVAL`].
    fn report_losses(&mut self) {
        let losses = &mut self.losses;
        if losses
            .reported_at
            .is_some_and(|at| at.elapsed() < REPORT_INTERVAL)
        {
            return;
        }
        let without_room = self.shared.unreported_drops.swap(0, Ordering::Relaxed);
        let lines = std::mem::take(&mut losses.lines) + without_room;
        let error = losses.error.take();
        if lines == 0 && error.is_none() {
            return;
        }
        losses.reported_at = Some(Instant::now());
        let path = self.path.display();
        match error {
            Some(error) => tracing::error!(%path, lines, %error, "could not write the access log"),
            None => tracing::error!(%path, lines, "the access log cannot be written fast enough"),
        }
    }
}

/// Returns queued lines as one batch, up to about [`WRITE_BYTES`], so that a busy log makes few
/// writes. Stops at a flush request.
fn batch(first: Message, messages: &Receiver<Message>) -> (Vec<u8>, Option<SyncSender<()>>) {
    let mut lines = Vec::new();
    let mut next = Some(first);
    while let Some(message) = next {
        match message {
            Message::Line(line) => lines.extend_from_slice(&line),
            Message::Reopened => {}
            Message::Flush(done) => return (lines, Some(done)),
        }
        let has_enough = lines.len() >= WRITE_BYTES;
        next = (!has_enough).then(|| messages.try_recv().ok()).flatten();
    }
    (lines, None)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    fn dropped(file: &AccessFile, reason: &'static str) -> u64 {
        let dropped = &file.shared.metrics.dropped;
        dropped.get_or_create(&DroppedLineLabels { reason }).get()
    }

    #[test]
    fn an_unread_pipe_blocks_no_request_and_losses_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let unread = AccessFile::open(&path).err().unwrap();
        assert_eq!(
            unread.raw_os_error(),
            Some(rustix::io::Errno::NXIO.raw_os_error())
        );
        let reader = OpenOptions::new().read(true).write(true).open(&path);
        let mut reader = BufReader::new(reader.unwrap());
        let file = AccessFile::open(&path).unwrap();
        // More than the pipe, the thread and the queue can hold.
        let line = [&[b'x'; 99][..], b"\n"].concat();
        let sent = 3 * LINES_MAX;
        for _ in 0..sent {
            file.make_writer().write_all(&line).unwrap();
        }
        let missing = dropped(&file, QUEUE_FULL);
        assert!(missing > 0);
        let mut read = Vec::new();
        for _ in missing..sent as u64 {
            read.clear();
            reader.read_until(b'\n', &mut read).unwrap();
            assert_eq!(read, line);
        }
        file.flush();
        assert_eq!(file.shared.waiting_bytes.load(Ordering::Relaxed), 0);
        assert_eq!(dropped(&file, WRITE_FAILED), 0);
    }

    #[test]
    fn buffered_log_bytes_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = AccessFile::open(&dir.path().join("log")).unwrap();
        let line = vec![b'\n'; WAITING_BYTES_MAX + 1];
        file.make_writer().write_all(&line).unwrap();
        assert_eq!(dropped(&file, QUEUE_FULL), 1);
        file.flush();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"");
    }

    #[test]
    fn a_full_disk_loses_lines_until_it_has_space() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let file = AccessFile::open(&path).unwrap();
        for line in [b"a\n", b"b\n"] {
            file.make_writer().write_all(line).unwrap();
        }
        file.flush();
        assert_eq!(dropped(&file, WRITE_FAILED), 2);
        std::fs::remove_file(&path).unwrap();
        file.reopen().unwrap();
        file.make_writer().write_all(b"c\n").unwrap();
        file.flush();
        assert_eq!(std::fs::read(&path).unwrap(), b"c\n");
        assert_eq!(dropped(&file, WRITE_FAILED), 2);
    }

    #[test]
    fn a_truncated_log_file_continues_on_a_new_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        for (before, after) in [
            ("", "next\n"),
            ("whole\n", "whole\nnext\n"),
            ("cu", "cu\nnext\n"),
        ] {
            std::fs::write(&path, before).unwrap();
            let file = AccessFile::open(&path).unwrap();
            file.make_writer().write_all(b"next\n").unwrap();
            file.flush();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
            std::fs::write(&path, before).unwrap();
            file.reopen().unwrap();
            file.make_writer().write_all(b"next\n").unwrap();
            file.flush();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after, "reopened");
        }
    }

    #[test]
    fn a_truncated_line_is_ended_before_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let file = open(&path).unwrap();
        let mut thread = WriterThread {
            path: path.clone(),
            file,
            is_torn: false,
            shared: Arc::default(),
            losses: Losses::default(),
        };
        let mut cut: &[u8] = b"whole\ncu";
        thread.write_rest(&mut cut).unwrap();
        thread.write(b"next\n").unwrap();
        thread.write(b"last\n").unwrap();
        let written = std::fs::read_to_string(path).unwrap();
        assert_eq!(written, "whole\ncu\nnext\nlast\n");
    }
}
