//! Whether this replica's list of API keys is current: it is while a leader with a quorum is heard.

use std::sync::Arc;

use api::api_keys::ListAge;
use raft::Status;
use raft::watch::WatchReceiver;
use tokio_util::sync::CancellationToken;

/// Tells the list whether it is current, whenever that changes, until `stop`.
pub(super) async fn follow(
    mut status: WatchReceiver<Status>,
    list: Arc<ListAge>,
    stop: CancellationToken,
) {
    loop {
        let is_current = {
            let status = status.borrow_and_update();
            status.has_quorum && status.caught_up
        };
        list.note(is_current);
        match stop.run_until_cancelled(status.changed()).await {
            Some(Ok(())) => {}
            Some(Err(_)) | None => return,
        }
    }
}
