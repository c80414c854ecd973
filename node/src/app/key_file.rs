//! Reloads files of keys and tokens when they change, so that revocation needs no restart.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use admin::AdminTokens;
use api::files::file_stamp::{FileStamp, look_regularly};
use api::proxy::ApiKeys;
use tokio_util::sync::CancellationToken;

use crate::config::{key_file, tokens_file};

/// A file, with the stamp that it had when it was last read.
struct WatchedFile<R> {
    file: PathBuf,
    read: R,
    seen: Option<FileStamp>,
}

impl<R: Fn(&Path)> WatchedFile<R> {
    /// Reads the file again if it has changed.
    fn look(&mut self) {
        let stamp = FileStamp::of(&self.file);
        if stamp == self.seen {
            return;
        }
        self.seen = stamp;
        (self.read)(&self.file);
    }
}

/// Accepts the keys in `file` from now on. If it cannot be read, the accepted keys stay the same.
pub(crate) fn read_api_keys(file: &Path, keys: &ApiKeys) {
    match key_file::read(file) {
        Ok(told) => {
            keys.replace(told);
            tracing::info!(?keys, "reloaded API keys");
        }
        Err(why) => tracing::error!(why, "could not reload API keys; keeping the old ones"),
    }
}

/// Accepts the tokens in `file` from now on. If it cannot be read, the accepted tokens stay the
/// same.
pub(crate) fn read_admin_tokens(file: &Path, tokens: &AdminTokens) {
    match tokens_file::read(file) {
        Ok(told) => {
            tokens.replace(told);
            tracing::info!(?tokens, "reloaded admin tokens");
        }
        Err(why) => tracing::error!(why, "could not reload admin tokens; keeping the old ones"),
    }
}

/// Calls `read` whenever `file` has changed, until `stop`.
pub(super) async fn follow(
    file: PathBuf,
    read: impl Fn(&Path) + Send + 'static,
    stop: CancellationToken,
) {
    // The first check always reads the file: it may have changed since the config was read.
    let seen = None;
    let followed = Mutex::new(WatchedFile { file, read, seen });
    let look = move || {
        let mut followed = followed.lock().unwrap_or_else(PoisonError::into_inner);
        followed.look();
    };
    look_regularly(look, stop).await;
}

#[cfg(test)]
mod tests {
    use api::proxy::Holder;

    use super::*;

    #[test]
    fn keys_follow_the_file_and_survive_a_broken_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let write = |text: &str| {
            // Written to another name and renamed, as a careful operator would.
            let beside = dir.path().join("beside");
            std::fs::write(&beside, text).unwrap();
            std::fs::rename(&beside, &file).unwrap();
        };
        write("sk-1 ada\n# old\nsk-2\n");
        let keys = ApiKeys::default();
        let mut followed = WatchedFile {
            file: file.clone(),
            read: |file: &Path| read_api_keys(file, &keys),
            seen: None,
        };
        followed.look();
        let named = |name: &str| Some(Holder::Named(name.into()));
        assert_eq!(keys.holder(b"sk-1"), named("ada"));
        assert_eq!(keys.holder(b"sk-2"), Some(Holder::Unnamed));
        write("sk-3 bo\n");
        followed.look();
        assert_eq!([keys.holder(b"sk-1"), keys.holder(b"sk-2")], [None, None]);
        for broken in [Some("# no key\n"), None] {
            match broken {
                Some(text) => write(text),
                None => std::fs::remove_file(&file).unwrap(),
            }
            followed.look();
            assert_eq!(keys.holder(b"sk-3"), named("bo"), "{broken:?}");
        }
        write("sk-4\n");
        followed.look();
        let served = [keys.holder(b"sk-4"), keys.holder(b"sk-3")];
        assert_eq!(served, [Some(Holder::Unnamed), None]);
    }
}
