//! The program's description of itself: version and manual.

#[path = "../../build/commit.rs"]
mod commit;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use commit::TreeCommit;
use tempfile::TempDir;

use super::{quorate, text};

fn git(dir: &Path, args: &[&str]) -> String {
    let own = ["-c", "user.name=a", "-c", "user.email=a@example.com"];
    let mut command = Command::new("git");
    let command = command.arg("-C").arg(dir).args(own).args(args);
    let command = command.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    let output = command.output().unwrap();
    assert!(output.status.success(), "git {args:?}: {output:?}");
    text(&output.stdout).trim().to_owned()
}

/// Creates a repository with one commit, and returns both.
fn repository() -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    git(dir.path(), &["init", "--quiet"]);
    git(
        dir.path(),
        &["commit", "--quiet", "--allow-empty", "-m", "a"],
    );
    let id = git(dir.path(), &["rev-parse", "HEAD"]);
    (dir, id)
}

#[test]
fn the_version_identifies_the_build() {
    let output = quorate(&["--version"]);
    let told = text(&output.stdout).trim();
    let version = env!("CARGO_PKG_VERSION");
    let build = told.strip_prefix(&format!("quorate {version} ("));
    let build = build.and_then(|rest| rest.strip_suffix(')'));
    assert!(build.is_some_and(|build| !build.is_empty()), "{told}");
    // Every command prints the same version.
    assert!(text(&quorate(&["backend", "--version"]).stdout).contains(version));
}

#[test]
fn the_build_finds_and_watches_the_commit() {
    let (dir, id) = repository();
    let found = TreeCommit::of(dir.path());
    assert_eq!(found.id.as_deref(), Some(&id[..12]));
    assert!(found.watched.len() >= 2, "{found:?}");
    assert!(found.watched.iter().all(|file| file.exists()), "{found:?}");
}

#[test]
fn source_trees_without_a_repository_have_no_commit() {
    let (dir, _) = repository();
    let inner = dir.path().join("unpacked");
    std::fs::create_dir(&inner).unwrap();
    assert_eq!(TreeCommit::of(&inner), TreeCommit::default());
    let outside = TempDir::new().unwrap();
    assert_eq!(TreeCommit::of(outside.path()), TreeCommit::default());
}

#[test]
fn a_source_archive_names_its_commit() {
    let (dir, _) = repository();
    let build = dir.path().join("node/build");
    std::fs::create_dir_all(&build).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let own = |file: &str| root.join(file);
    std::fs::copy(
        own("node/build/archived-commit"),
        build.join("archived-commit"),
    )
    .unwrap();
    std::fs::copy(own(".gitattributes"), dir.path().join(".gitattributes")).unwrap();
    git(dir.path(), &["add", "."]);
    git(dir.path(), &["commit", "--quiet", "-m", "b"]);
    let id = git(dir.path(), &["rev-parse", "HEAD"]);
    let unpacked = TempDir::new().unwrap();
    let archive = unpacked.path().join("archive.tar");
    let name = archive.display().to_string();
    git(
        dir.path(),
        &["archive", "--format=tar", "-o", &name, "HEAD"],
    );
    let mut tar = Command::new("tar");
    let tar = tar.arg("-xf").arg(&archive).arg("-C").arg(unpacked.path());
    assert!(tar.status().unwrap().success());
    assert_eq!(
        TreeCommit::of(unpacked.path()).id.as_deref(),
        Some(&id[..12])
    );
}

/// Collects every command, such as `config check`, from the program's help.
fn commands(prefix: &str, found: &mut BTreeSet<String>) {
    let args: Vec<&str> = prefix.split(' ').filter(|it| !it.is_empty()).collect();
    let help = quorate(&[&args[..], &["--help"]].concat());
    let help = text(&help.stdout).to_owned();
    // The commands of the program itself stand under several headings, before the options.
    let list = if prefix.is_empty() {
        help.split("\nOptions:").next()
    } else {
        let list = help.split_once("Commands:\n").map(|(_, list)| list);
        list.and_then(|list| list.split("\n\n").next())
    };
    let list = list.unwrap_or_default();
    // Names are indented by two columns, continuation lines by more.
    let names = list.lines().filter_map(|line| line.strip_prefix("  "));
    let names = names.filter(|line| !line.starts_with(' '));
    for name in names.filter_map(|line| line.split(' ').next()) {
        if name != "help" {
            let command = format!("{prefix} {name}").trim().to_owned();
            commands(&command, found);
            found.insert(command);
        }
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("man");
    let output = quorate(&["man", "--out", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let mut all = BTreeSet::new();
    commands("", &mut all);
    assert!(
        all.contains("config check") && all.contains("backend drain"),
        "{all:?}"
    );
    for command in &all {
        let file = folder.join(format!("quorate-{}.1", command.replace(' ', "-")));
        let page = std::fs::read_to_string(&file);
        let page = page.unwrap_or_else(|_| panic!("no page {}", file.display()));
        assert!(page.contains(".SH \"EXIT STATUS\"") || page.contains(".SH EXIT STATUS"));
        let args: Vec<&str> = command.split(' ').collect();
        let printed = quorate(&[&["man"], &args[..]].concat());
        assert_eq!(text(&printed.stdout).trim(), page.trim(), "{command}");
    }
    assert!(folder.join("quorate.1").exists());
    assert_eq!(quorate(&["man", "nonsense"]).status.code(), Some(1));
}
