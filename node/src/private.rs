//! Files that only this process's user may read: what is kept on disk names users and what they used.

use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use rustix::fs::Mode;

/// Bits that let others than the owner in.
const OTHERS: u32 = 0o077;

/// Has every file and folder that this process makes be its user's alone.
pub(crate) fn keep_new_files_private() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Makes a folder that only its owner may look into, or makes it one.
pub(crate) fn private_folder(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(path)?;
    let mode = path.metadata()?.permissions().mode();
    if mode & OTHERS != 0 {
        let own = std::fs::Permissions::from_mode(mode & !OTHERS);
        std::fs::set_permissions(path, own)?;
    }
    Ok(())
}

/// Whether others than its owner may read the file: a secret in it is none.
pub(crate) fn is_open_to_others(path: &Path) -> bool {
    // What cannot be looked at was told when it was read.
    path.metadata()
        .is_ok_and(|found| found.permissions().mode() & OTHERS != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_closed_to_others_also_when_it_was_open() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        private_folder(&folder).unwrap();
        let mode = || folder.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o700);
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_open_to_others(&folder));
        private_folder(&folder).unwrap();
        assert_eq!(mode(), 0o700);
        assert!(!is_open_to_others(&folder));
    }
}
