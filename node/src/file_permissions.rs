//! Permissions of files. Files that this process creates are private to its user, because they
//! contain names and usage of users. Files with secrets are checked to be closed to all but their
//! user and group.

use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use rustix::fs::Mode;

/// Permission bits of a file's group and of all other users.
const OTHERS: u32 = 0o077;
/// Permission bits of all other users. Containers mount secrets as readable by a group.
const EVERYBODY: u32 = 0o007;

/// Makes all files and folders that this process creates private to its user.
pub(crate) fn keep_new_files_private() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Creates a folder that only its owner may read, or restricts an existing one.
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

/// Whether users outside the file's group have any access to it, as they must not with a secret.
/// `false` if the file cannot be examined.
pub(crate) fn is_open_to_others(path: &Path) -> bool {
    // If this fails, the read of the file has already failed and was reported.
    path.metadata()
        .is_ok_and(|found| found.permissions().mode() & EVERYBODY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_folder_is_made_private() {
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

    #[test]
    fn a_secret_readable_by_its_group_is_accepted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let with = |mode| {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            is_open_to_others(file.path())
        };
        // Kubernetes mounts a Secret like this for the group of a pod.
        assert!(!with(0o440));
        assert!(with(0o444));
        assert!(with(0o604));
    }
}
