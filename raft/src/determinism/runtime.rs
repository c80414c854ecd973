//! Runtime for openraft: tokio with repeatable random numbers and wake-ups, and with timeouts that
//! a call may extend.

use std::future::Future;
use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft::async_runtime::watch::{self, RecvError, SendError, Watch};
use openraft::impls::TokioRuntime;
use openraft::{OptionalSend, OptionalSync};

use crate::determinism::random::Generator;
use crate::determinism::timeout::{Elapsed, Timeout};
use crate::determinism::watch::{WatchReceiver, WatchRef, WatchSender};

/// Runtime for openraft; see the module documentation.
#[derive(Debug)]
pub(crate) struct Runtime(TokioRuntime);

impl AsyncRuntime for Runtime {
    type JoinError = <TokioRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::JoinHandle<T>;
    type Sleep = <TokioRuntime as AsyncRuntime>::Sleep;
    type Instant = <TokioRuntime as AsyncRuntime>::Instant;
    type TimeoutError = Elapsed;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = Timeout<T>;
    type ThreadLocalRng = Generator;
    type Mpsc = <TokioRuntime as AsyncRuntime>::Mpsc;
    type Watch = Watched;
    type Oneshot = <TokioRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::Mutex<T>;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        TokioRuntime::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        TokioRuntime::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        TokioRuntime::sleep_until(deadline)
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        Timeout::new(TokioRuntime::sleep(duration), future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        Timeout::new(TokioRuntime::sleep_until(deadline), future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        TokioRuntime::is_panic(join_error)
    }

    fn thread_rng() -> Generator {
        Generator
    }

    fn new(threads: usize) -> Self {
        Self(TokioRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }
}

/// Adapter of [`crate::determinism::watch`] to openraft's trait.
#[derive(Debug)]
pub(crate) struct Watched;

impl Watch for Watched {
    type Sender<T: OptionalSend + OptionalSync> = WatchSender<T>;
    type Receiver<T: OptionalSend + OptionalSync> = WatchReceiver<T>;
    type Ref<'a, T: OptionalSend + 'a> = WatchRef<'a, T>;

    fn channel<T: OptionalSend + OptionalSync>(init: T) -> (WatchSender<T>, WatchReceiver<T>) {
        let sender = WatchSender::new(init);
        let receiver = sender.subscribe();
        (sender, receiver)
    }
}

impl<T: OptionalSend + OptionalSync> watch::WatchSender<Watched, T> for WatchSender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if !self.has_receivers() {
            return Err(SendError(value));
        }
        self.send_replace(value);
        Ok(())
    }

    fn send_if_modified<F>(&self, modify: F) -> bool
    where
        F: FnOnce(&mut T) -> bool,
    {
        WatchSender::send_if_modified(self, modify)
    }

    fn borrow_watched(&self) -> WatchRef<'_, T> {
        self.borrow()
    }

    fn subscribe(&self) -> WatchReceiver<T> {
        WatchSender::subscribe(self)
    }
}

impl<T: OptionalSend + OptionalSync> watch::WatchReceiver<Watched, T> for WatchReceiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        WatchReceiver::changed(self)
            .await
            .map_err(|_| RecvError(()))
    }

    fn borrow_watched(&self) -> WatchRef<'_, T> {
        self.borrow()
    }

    fn borrow_and_update(&mut self) -> WatchRef<'_, T> {
        WatchReceiver::borrow_and_update(self)
    }
}
