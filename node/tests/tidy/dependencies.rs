//! docs/internals/dependencies.md states the number of packages, and the purpose of those that our
//! crates name.

use super::root;

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).expect("read a text file")
}

#[test]
fn the_dependencies_page_counts_packages() {
    let lock = read("Cargo.lock");
    let packages = lock.split("[[package]]").skip(1);
    let of_others = packages.filter(|package| package.contains("\nsource = \""));
    let told = format!(
        "`Cargo.lock` has {} third-party packages",
        of_others.count()
    );
    let page = read("docs/internals/dependencies.md");
    assert!(page.contains(&told), "expected: {told}");
    let sources = lock.lines().filter(|line| line.starts_with("source = "));
    let registry = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
    let foreign: Vec<_> = sources.filter(|line| *line != registry).collect();
    assert_eq!(foreign, Vec::<&str>::new(), "not from crates.io");
}

#[test]
fn the_dependencies_page_explains_each_named_package() {
    let manifest = read("Cargo.toml");
    let (_, named) = manifest
        .split_once("[workspace.dependencies]\n")
        .expect("the manifest names dependencies");
    let named = named.lines().take_while(|line| !line.starts_with('['));
    let page = read("docs/internals/dependencies.md");
    let is_untold = |line: &&str| {
        let name = line.split_once(" = ").map(|(name, _)| name);
        let is_ours = line.contains("path = ");
        let is_told = |name| page.contains(&format!("`{name}`"));
        !is_ours && !line.starts_with('#') && name.is_some_and(|name| !is_told(name))
    };
    let untold: Vec<_> = named.filter(is_untold).collect();
    assert_eq!(untold, Vec::<&str>::new(), "not in the page");
}
