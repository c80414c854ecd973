//! Targets of a load: base URLs that requests use in turn, except those that are known to be down.
//!
//! A caller that takes a target down on purpose calls [`Targets::set_up`] *before* doing it; if a
//! request in flight there then fails, it counts as lost, not as failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::net::tls::ClientConfig;
use http::Uri;
use tokio::sync::watch;

/// Base URLs of replicas or engines, with their states.
#[derive(Debug)]
pub struct Targets {
    list: Vec<LoadTarget>,
    access: Option<TargetAccess>,
    turn: AtomicUsize,
    /// Number of state changes of each target. Even means up, odd means down.
    lives: watch::Sender<Vec<u64>>,
}

/// TLS config and API keys for access to targets.
#[derive(Debug, Clone)]
pub struct TargetAccess {
    /// TLS config with the trusted certificate authorities.
    pub tls: Arc<ClientConfig>,
    /// Prefix of API keys. A user's key is this prefix followed by the user's name.
    pub key_prefix: String,
}

#[derive(Debug)]
struct LoadTarget {
    name: String,
}

/// A target that was picked for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PickedTarget {
    /// Index of the target in the list.
    pub index: usize,
    life: u64,
}

/// Error about a URL that cannot be a target. The URL is empty if the list of targets is.
#[derive(Debug, thiserror::Error)]
#[error("expected a target like http://host:port, found {0:?}")]
pub struct TargetError(String);

impl Targets {
    /// Creates targets that are all up, without TLS and keys.
    ///
    /// # Errors
    /// If a URL does not have the form `http://host[:port]`, or the list is empty.
    pub fn new<S: AsRef<str>>(urls: &[S]) -> Result<Self, TargetError> {
        Self::of(urls, None)
    }

    /// Creates targets that are all up, with TLS and keys.
    ///
    /// # Errors
    /// If a URL does not have the form `https://host[:port]`, or the list is empty.
    pub fn secure<S: AsRef<str>>(urls: &[S], access: TargetAccess) -> Result<Self, TargetError> {
        Self::of(urls, Some(access))
    }

    fn of<S: AsRef<str>>(urls: &[S], access: Option<TargetAccess>) -> Result<Self, TargetError> {
        let scheme = if access.is_some() { "https" } else { "http" };
        let list: Vec<LoadTarget> = urls
            .iter()
            .map(|url| LoadTarget::new(scheme, url.as_ref()))
            .collect::<Result<_, _>>()?;
        if list.is_empty() {
            return Err(TargetError(String::new()));
        }
        let lives = watch::Sender::new(vec![0; list.len()]);
        Ok(Self {
            list,
            access,
            turn: AtomicUsize::new(0),
            lives,
        })
    }

    /// Returns the TLS config and key prefix of the targets; `None` for targets without TLS.
    #[must_use]
    pub fn access(&self) -> Option<&TargetAccess> {
        self.access.as_ref()
    }

    /// Returns the number of targets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns `false`, because the list of targets is never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the base URL of the target at `index`.
    #[must_use]
    pub fn name(&self, index: usize) -> &str {
        &self.list[index].name
    }

    /// Records that the target at `index` is about to go down, or has come up.
    pub fn set_up(&self, index: usize, is_up: bool) {
        self.lives.send_modify(|lives| {
            if is_alive(lives[index]) != is_up {
                lives[index] += 1;
            }
        });
    }

    /// Picks the next target that is up; `None` if all are down.
    #[must_use]
    pub fn pick(&self) -> Option<PickedTarget> {
        let lives = self.lives.borrow();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        (0..self.list.len())
            .map(|offset| (turn + offset) % self.list.len())
            .find(|index| is_alive(lives[*index]))
            .map(|index| PickedTarget {
                index,
                life: lives[index],
            })
    }

    /// Returns whether the target of `pick` went down since it was picked.
    #[must_use]
    pub fn went_down(&self, pick: PickedTarget) -> bool {
        self.lives.borrow()[pick.index] != pick.life
    }

    /// Waits until a target is up.
    pub async fn wait_for_one(&self) {
        let mut lives = self.lives.subscribe();
        let some_alive = |lives: &Vec<u64>| lives.iter().any(|life| is_alive(*life));
        // The channel stays open, because `self` owns the sender.
        let _ = lives.wait_for(some_alive).await;
    }

    /// Returns the URL of `path` on the target at `index`.
    ///
    /// # Panics
    /// If `path` is not a valid URL path.
    #[must_use]
    pub fn uri(&self, index: usize, path: &str) -> Uri {
        format!("{}{path}", self.list[index].name)
            .parse()
            .expect("the authority was parsed, and the path is one")
    }
}

fn is_alive(life: u64) -> bool {
    life.is_multiple_of(2)
}

impl LoadTarget {
    fn new(scheme: &str, url: &str) -> Result<Self, TargetError> {
        let bad = || TargetError(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
        if uri.scheme_str() != Some(scheme) || !is_bare {
            return Err(bad());
        }
        let authority = uri.authority().ok_or_else(bad)?.to_string();
        Ok(Self {
            name: format!("{scheme}://{authority}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_rotate_and_down_ones_are_skipped() {
        let targets = Targets::new(&["http://a:1", "http://b:2/", "http://c"]).unwrap();
        let turn = |count: usize| -> Vec<usize> {
            (0..count).map(|_| targets.pick().unwrap().index).collect()
        };
        assert_eq!(turn(4), [0, 1, 2, 0]);
        let before = targets.pick().unwrap();
        assert_eq!(before.index, 1);
        targets.set_up(1, false);
        targets.set_up(1, false);
        assert!(targets.went_down(before));
        assert!(!turn(6).contains(&1));
        targets.set_up(1, true);
        assert!(targets.went_down(before), "it came up as another");
        assert!(turn(3).contains(&1));
        for index in 0..3 {
            targets.set_up(index, false);
        }
        assert_eq!(targets.pick(), None);
    }

    #[test]
    fn only_plain_base_urls_are_targets() {
        for bad in [
            "",
            "localhost",
            "https://a",
            "http://a/v1",
            "http://a?x",
            "http://",
            "ftp://a",
        ] {
            assert!(Targets::new(&[bad]).is_err(), "{bad}");
        }
        assert!(Targets::new::<&str>(&[]).is_err());
    }
}
