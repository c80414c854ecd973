//! Waits until sled releases its data file.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

const WAIT_MAX: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(1);

/// Waits until sled releases its data file. Its thread pool may still hold the file for a write,
/// and reopening the folder in the same process would then fail.
pub(super) fn wait(data: &Path) -> io::Result<()> {
    let file = File::open(data)?;
    let mut waited = Duration::ZERO;
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if waited < WAIT_MAX => {
                std::thread::sleep(POLL);
                waited += POLL;
            }
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn closing_a_log_waits_for_its_file_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().lock().unwrap();
        let is_released = AtomicBool::new(false);
        let (starts, started) = mpsc::channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                starts.send(()).unwrap();
                wait(file.path()).unwrap();
                is_released.load(Ordering::Acquire)
            });
            started.recv().unwrap();
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            is_released.store(true, Ordering::Release);
            file.as_file().unlock().unwrap();
            assert!(waiter.join().unwrap(), "returned while the file was locked");
        });
    }
}
