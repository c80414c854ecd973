//! Rules about dependencies between modules: no cycle among siblings, in any crate, at any depth.
//!
//! A child may use its ancestors. Only the uses between siblings count, each including everything
//! below it. A path counts for the module that defines the item, not for one that re-exports it.

mod source;

use std::collections::{BTreeMap, BTreeSet};

use self::source::{Crate, Module, ModulePath};

/// Crates, as folders.
const CRATES: &[&str] = &[
    "state",
    "raft",
    "api",
    "api/admin",
    "node/lab",
    "node",
    "chaos-tests",
];

/// Longest chain of re-exports that is resolved.
const HOPS_MAX: usize = 8;

/// Uses between the children of a module, with the paths that cause them.
type Edges = BTreeMap<(ModulePath, String, String), BTreeSet<String>>;

fn edges(modules: &Crate) -> Edges {
    let mut edges = Edges::new();
    for (from, module) in &modules.0 {
        for path in &module.paths {
            let Some(to) = target(modules, from, path, 0) else {
                continue;
            };
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if common < from.len() && common < to.len() {
                let (user, used) = (from[common].clone(), to[common].clone());
                let key = (from[..common].to_vec(), user, used);
                let example = format!("{}: {}", from.join("::"), path.join("::"));
                edges.entry(key).or_default().insert(example);
            }
        }
    }
    edges
}

/// Returns the module that defines the target of `path`, which the module at `from` contains;
/// `None` if that is in another crate.
fn target(modules: &Crate, from: &[String], path: &[String], hops: usize) -> Option<ModulePath> {
    let first = path.first()?;
    let mut at = from.to_vec();
    let mut rest = path;
    match first.as_str() {
        "crate" => (at, rest) = (Vec::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                at.pop();
                rest = &rest[1..];
            }
        }
        name if !modules.0[&at].children.contains(name) => return None,
        _ => {}
    }
    while let Some((name, behind)) = rest.split_first() {
        // The file of a module with a `#[path]` may be outside of the crate.
        let module = modules.0.get(&at)?;
        if module.children.contains(name) {
            at.push(name.clone());
            rest = behind;
            continue;
        }
        let handed_on = handed_on(modules, &at, module, name, hops);
        return Some(handed_on.unwrap_or(at));
    }
    Some(at)
}

/// Returns the module that defines `name`, if the module at `at` imports it.
fn handed_on(
    modules: &Crate,
    at: &[String],
    module: &Module,
    name: &str,
    hops: usize,
) -> Option<ModulePath> {
    if hops == HOPS_MAX || module.items.contains(name) {
        return None;
    }
    if let Some(import) = module.imports.get(name) {
        return target(modules, at, import, hops + 1);
    }
    module.globs.iter().find_map(|glob| {
        let within = target(modules, at, glob, hops + 1)?;
        let of = &modules.0[&within];
        match of.items.contains(name) || of.children.contains(name) {
            true => Some(within),
            false => handed_on(modules, &within, of, name, hops + 1),
        }
    })
}

/// Returns the cycles: children of one module that all reach each other.
fn circles(edges: &Edges) -> Vec<(ModulePath, BTreeSet<String>)> {
    let mut reach: BTreeMap<(&ModulePath, &str), BTreeSet<&str>> = BTreeMap::new();
    for (parent, from, to) in edges.keys() {
        reach.entry((parent, from)).or_default().insert(to);
    }
    loop {
        let mut grown = reach.clone();
        for ((parent, _), reached) in &mut grown {
            let further = reached.clone();
            let further = further.iter().filter_map(|to| reach.get(&(*parent, *to)));
            reached.extend(further.flatten());
        }
        if grown == reach {
            break;
        }
        reach = grown;
    }
    let mut found = BTreeSet::new();
    for ((parent, from), reached) in &reach {
        let is_mutual = |to: &&&str| {
            reach
                .get(&(*parent, **to))
                .is_some_and(|it| it.contains(from))
        };
        let circle: BTreeSet<_> = reached
            .iter()
            .filter(is_mutual)
            .map(|to| (*to).to_owned())
            .collect();
        if reached.contains(from) {
            found.insert(((*parent).clone(), circle));
        }
    }
    found.into_iter().collect()
}

#[test]
fn modules_form_no_cycle() {
    let mut shown = String::new();
    for name in CRATES {
        let modules = Crate::read(&super::root().join(name).join("src"));
        let edges = edges(&modules);
        for (parent, circle) in circles(&edges) {
            let path = [&[(*name).to_owned()][..], &parent].concat().join("::");
            for ((at, from, to), uses) in &edges {
                if *at == parent && circle.contains(from) && circle.contains(to) {
                    let uses: Vec<_> = uses.iter().map(String::as_str).collect();
                    shown += &format!("{path}: {from} -> {to}: {}\n", uses.join(", "));
                }
            }
        }
    }
    assert!(shown.is_empty(), "circles among modules:\n{shown}");
}

#[test]
fn a_cycle_through_uses_paths_and_re_exports_is_found() {
    let modules = Crate::of(&[
        (
            "lib.rs",
            "mod a; mod b; mod c; mod d; pub use c::Word; pub use d::*;",
        ),
        ("a.rs", "use crate::{b::{self, Other as Another}, Word};"),
        (
            "b.rs",
            "fn f(it: &'a str) -> crate::Thing { \"crate::c\"; '\"'; r#\"super::c\"# }",
        ),
        (
            "c.rs",
            "pub struct Word; #[cfg(test)] mod tests { use crate::a; } #[cfg(test)] use crate::a;",
        ),
        (
            "d/mod.rs",
            "mod e; mod f; pub struct Thing; mod g { use super::super::a::X; } // crate::c",
        ),
        (
            "d/e.rs",
            "#[cfg(feature = \"fuzzing\")]\nuse super::f::Y;\nfn h() {}",
        ),
        (
            "d/f.rs",
            "macro_rules! m { () => { $crate::d::e::h() } } pub(in crate::d) fn x() {}",
        ),
    ]);
    let edges = edges(&modules);
    let known: Vec<_> = edges
        .keys()
        .map(|(at, from, to)| format!("{}: {from} -> {to}", at.join("::")))
        .collect();
    assert_eq!(
        known,
        [": a -> b", ": a -> c", ": b -> d", ": d -> a", "d: f -> e"]
    );
    let circle = ["a", "b", "d"].map(str::to_owned).into();
    assert_eq!(circles(&edges), [(Vec::new(), circle)]);
}
