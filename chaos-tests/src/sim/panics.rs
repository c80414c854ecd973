//! Panics of simulated processes. Tokio contains them in the task, but each is a defect.

use std::cell::RefCell;
use std::sync::Once;

thread_local! {
    /// Panics of this thread so far; `None` if the thread simulates nothing.
    static SEEN: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Collects panics of this thread for [`take`] from now on, without printing them.
pub(super) fn watch() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let is_kept = SEEN.try_with(|seen| {
                // A panic during recording cannot be kept.
                let Ok(mut seen) = seen.try_borrow_mut() else {
                    return false;
                };
                seen.as_mut()
                    .map(|seen| seen.push(info.to_string()))
                    .is_some()
            });
            if !is_kept.unwrap_or(false) {
                before(info);
            }
        }));
    });
    SEEN.set(Some(Vec::new()));
}

/// Returns the panics of this thread since the last call.
pub(super) fn take() -> Vec<String> {
    SEEN.with_borrow_mut(|seen| seen.as_mut().map(std::mem::take).unwrap_or_default())
}

/// Stops collecting panics of this thread.
pub(super) fn leave() {
    SEEN.set(None);
}
