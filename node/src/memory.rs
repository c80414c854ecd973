//! The memory limit of this process, and the share that request bodies may hold.
//!
//! In a container, the kernel kills the process at the cgroup's limit, so requests must stay well
//! below it. The limit is read at start and whenever the config is reloaded.

use std::path::{Path, PathBuf};

use api::proxy::ProxyLimits;

/// Maximum of the default for the memory that requests may hold, in bytes.
const HELD_BYTES_MAX: u64 = 1 << 30;
/// Smallest value that means that there is no limit: cgroup version 1 reports a huge number.
const UNLIMITED: u64 = 1 << 60;

/// Derives the limits that the config leaves open from the memory `limit`, and warns if the limits
/// do not fit into it.
pub(crate) fn fit(limits: &mut ProxyLimits, limit: Option<u64>) {
    let by_memory = held_bytes_max(limit, limits.body_bytes_max);
    let chosen = *limits.held_bytes_max.get_or_insert(by_memory);
    tracing::info!(limit, max_held_bodies = chosen, "memory");
    if let Some(limit) = limit
        && !is_fitting(chosen, limit)
    {
        tracing::warn!(
            limit,
            max_held_bodies = chosen,
            "limits.max_held_bodies is more than half of the memory limit: the process may run out \
             of memory"
        );
    }
}

/// Returns the default for the memory that requests may hold: a quarter of `limit`, because a body
/// takes up to three times its length. At most [`HELD_BYTES_MAX`], but always enough for one body.
fn held_bytes_max(limit: Option<u64>, body_bytes_max: u64) -> u64 {
    let by_memory = limit.map_or(HELD_BYTES_MAX, |limit| HELD_BYTES_MAX.min(limit / 4));
    by_memory.max(body_bytes_max)
}

/// Whether the held bytes, which include read-ahead, fit into half of the memory.
fn is_fitting(held_bytes: u64, limit: u64) -> bool {
    held_bytes <= limit / 2
}

/// Returns the lowest memory limit of this process's cgroups; `None` if there is none.
pub(crate) fn limit() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let files = own.lines().flat_map(files_of).collect::<Vec<_>>();
    let read = |file: PathBuf| limit_in(&std::fs::read_to_string(file).ok()?);
    files.into_iter().filter_map(read).min()
}

/// Returns the files that may limit memory according to one line of `/proc/self/cgroup`: those of
/// the group and of all its ancestors. In a container's own view, the group may not exist, but its
/// root does.
fn files_of(line: &str) -> Vec<PathBuf> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (root, file) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|it| it == "memory") => {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return Vec::new(),
    };
    let group = Path::new(group.trim_start_matches('/'));
    let groups = group.ancestors();
    groups
        .map(|it| Path::new(root).join(it).join(file))
        .collect()
}

/// Parses the contents of a file with a memory limit; `None` if it sets no limit.
fn limit_in(text: &str) -> Option<u64> {
    let bytes = text.trim().parse().ok()?;
    (bytes < UNLIMITED).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(line: &str) -> Vec<String> {
        let files = files_of(line).into_iter();
        files.map(|it| it.display().to_string()).collect()
    }

    #[test]
    fn memory_limits_are_searched_up_to_the_root_cgroup() {
        assert_eq!(
            files("0::/a/b"),
            [
                "/sys/fs/cgroup/a/b/memory.max",
                "/sys/fs/cgroup/a/memory.max",
                "/sys/fs/cgroup/memory.max",
            ]
        );
        assert_eq!(
            files("4:cpu,memory:/a"),
            [
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ]
        );
        assert_eq!(files("0::/"), ["/sys/fs/cgroup/memory.max"]);
        for other in ["3:cpuset:/a", "9:name=systemd:/", "memory", ""] {
            assert!(files(other).is_empty(), "{other:?}");
        }
    }

    #[test]
    fn a_memory_limit_is_a_number_below_the_unlimited_value() {
        assert_eq!(limit_in("536870912\n"), Some(512 << 20));
        for none in ["max\n", "9223372036854771712\n", "", "-1", "1 2"] {
            assert_eq!(limit_in(none), None, "{none:?}");
        }
    }

    #[test]
    fn request_memory_is_a_quarter_and_at_least_one_body() {
        assert_eq!(held_bytes_max(None, 1), 1 << 30);
        assert_eq!(held_bytes_max(Some(64 << 30), 1), 1 << 30);
        assert_eq!(held_bytes_max(Some(512 << 20), 1), 128 << 20);
        assert_eq!(held_bytes_max(Some(64 << 20), 32 << 20), 32 << 20);
        assert!(is_fitting(256 << 20, 512 << 20));
        assert!(!is_fitting((256 << 20) + 1, 512 << 20));
    }
}
