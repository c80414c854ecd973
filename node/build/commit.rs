//! Finds the commit of a source tree: in its repository, or in an archive made of one.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Number of hex digits that are shown.
const DIGITS: usize = 12;
/// File whose text `git archive` replaces by the commit.
const ARCHIVED: &str = "node/build/archived-commit";

/// The commit of a source tree.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TreeCommit {
    /// First digits of the commit; `None` if it is unknown.
    pub(crate) id: Option<String>,
    /// Files that change with the commit.
    pub(crate) watched: Vec<PathBuf>,
}

impl TreeCommit {
    /// Finds the commit of the tree whose workspace is at `root`.
    pub(crate) fn of(root: &Path) -> Self {
        let archived = std::fs::read_to_string(root.join(ARCHIVED)).unwrap_or_default();
        if let Some(id) = shortened(&archived) {
            return Self {
                id: Some(id),
                watched: Vec::new(),
            };
        }
        Self::checked_out(root).unwrap_or_default()
    }

    fn checked_out(root: &Path) -> Option<Self> {
        // A tree may lie in the repository of another project.
        let top = PathBuf::from(git(root, &["rev-parse", "--show-toplevel"])?);
        if top.canonicalize().ok()? != root.canonicalize().ok()? {
            return None;
        }
        let id = shortened(&git(root, &["rev-parse", "HEAD"])?);
        let branch = git(root, &["symbolic-ref", "--quiet", "HEAD"]);
        let names = ["HEAD", "logs/HEAD", "packed-refs"].map(str::to_owned);
        let files = names.into_iter().chain(branch);
        let files = files.filter_map(|name| git(root, &["rev-parse", "--git-path", &name]));
        let files = files
            .map(|path| root.join(path))
            .filter(|path| path.exists());
        Some(Self {
            id,
            watched: files.collect(),
        })
    }
}

/// Returns the first digits of a commit.
fn shortened(text: &str) -> Option<String> {
    let id = text.trim();
    let is_id = id.len() >= DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then(|| id[..DIGITS].to_owned())
}

/// Returns the output of git; `None` without git or a repository.
fn git(root: &Path, args: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // In a hook, these variables name the repository of the hook's commit.
    command.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    let output = command.arg("-C").arg(root).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let is_found = output.status.success() && !text.trim().is_empty();
    is_found.then(|| text.trim().to_owned())
}
