//! The modules of a crate and the paths in them, read from the text without a compiler.
//!
//! The reader skips comments, keeps a string as one token, and omits code under `#[cfg(test)]` or
//! the feature `fuzzing`. Macros are read like any other text: paths in them count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names from the crate's root to a module.
pub(super) type ModulePath = Vec<String>;

/// A module: what it declares, imports and refers to.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Modules declared in it.
    pub(super) children: BTreeSet<String>,
    /// Paths that may refer to another module.
    pub(super) paths: Vec<Vec<String>>,
    /// Imported names and the paths that they stand for; the module may re-export them.
    pub(super) imports: BTreeMap<String, Vec<String>>,
    /// Modules imported by glob.
    pub(super) globs: Vec<Vec<String>>,
    /// Names of its items.
    pub(super) items: BTreeSet<String>,
}

/// All modules of a crate.
#[derive(Debug, Default)]
pub(super) struct Crate(pub(super) BTreeMap<ModulePath, Module>);

impl Crate {
    /// Reads the crate whose sources are in `src`.
    pub(super) fn read(src: &Path) -> Self {
        let mut modules = Self::default();
        modules.load("lib.rs", &Vec::new(), &|file| {
            std::fs::read_to_string(src.join(file)).ok()
        });
        assert!(modules.0.len() > 5, "only {modules:?} in {}", src.display());
        modules
    }

    /// Creates a crate from these files, to test the rules.
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let mut modules = Self::default();
        modules.load("lib.rs", &Vec::new(), &|file| {
            let found = files.iter().find(|(name, _)| *name == file);
            found.map(|(_, text)| (*text).to_owned())
        });
        modules
    }

    fn load(&mut self, file: &str, at: &ModulePath, open: &dyn Fn(&str) -> Option<String>) {
        let text = open(file).unwrap_or_else(|| panic!("{file} is declared and not there"));
        let mut inside = Reader {
            tokens: tokens(&text),
            next: 0,
        };
        let folder = match file.rsplit_once('/') {
            Some((folder, "mod.rs")) => folder.to_owned(),
            None if at.is_empty() => String::new(),
            Some(_) | None => file.trim_end_matches(".rs").to_owned(),
        };
        for (module, declared) in inside.module(at.clone()) {
            for child in &declared.children {
                let path = [&module[..], std::slice::from_ref(child)].concat();
                let below = path[at.len()..].join("/");
                let stem = match folder.as_str() {
                    "" => below,
                    folder => format!("{folder}/{below}"),
                };
                let files = [format!("{stem}.rs"), format!("{stem}/mod.rs")];
                // A module without a file is inline.
                if let Some(file) = files.iter().find(|file| open(file).is_some()) {
                    self.load(file, &path, open);
                }
            }
            self.0.insert(module, declared);
        }
    }
}

/// Reads the tokens of one file.
struct Reader {
    tokens: Vec<String>,
    next: usize,
}

impl Reader {
    /// Reads the module at `at` up to its end, and its inline modules.
    fn module(&mut self, at: ModulePath) -> Vec<(ModulePath, Module)> {
        let (mut module, mut within) = (Module::default(), Vec::new());
        let mut depth = 0;
        while let Some(token) = self.take() {
            match token.as_str() {
                "{" => depth += 1,
                "}" if depth == 0 => break,
                "}" => depth -= 1,
                "#" if self.is_left_out() => self.skip_item(),
                "mod" if self.is_name(0) => {
                    let name = self.take().expect("a name is next");
                    module.children.insert(name.clone());
                    if self.peek(0) == "{" {
                        self.next += 1;
                        within.extend(self.module([&at[..], &[name]].concat()));
                    }
                }
                "use" if self.peek(0) != "<" => self.use_tree(&mut Vec::new(), &mut module),
                "crate" | "super" => {
                    self.next -= 1;
                    let path = self.path();
                    module.paths.push(path);
                }
                "struct" | "enum" | "fn" | "trait" | "type" | "const" | "static"
                    if depth == 0 && self.is_name(0) =>
                {
                    module.items.insert(self.peek(0).to_owned());
                }
                _ => {}
            }
        }
        within.push((at, module));
        within
    }

    /// Skips the attribute after a `#`. Returns whether it excludes its item from the product.
    fn is_left_out(&mut self) -> bool {
        let from = self.next;
        if self.peek(0) != "[" {
            return false;
        }
        self.next += 1;
        self.skip_to_close();
        let attribute = &self.tokens[from..self.next];
        let is = |nth: usize, word: &str| attribute.get(nth).is_some_and(|token| token == word);
        is(1, "cfg")
            && !is(3, "not")
            && attribute
                .iter()
                .any(|it| it == "test" || it == "\"fuzzing\"")
    }

    fn skip_item(&mut self) {
        while self.peek(0) == "#" {
            self.next += 2;
            self.skip_to_close();
        }
        while !self.peek(0).is_empty() {
            match self.peek(0) {
                ";" | "," => {
                    self.next += 1;
                    return;
                }
                "}" | ")" | "]" => return,
                "{" => {
                    self.next += 1;
                    self.skip_to_close();
                    // A list of imports ends after its braces.
                    if self.peek(0) == ";" {
                        self.next += 1;
                    }
                    return;
                }
                "(" | "[" => {
                    self.next += 1;
                    self.skip_to_close();
                }
                _ => self.next += 1,
            }
        }
    }

    /// Skips to the end of the current brackets, of any kind.
    fn skip_to_close(&mut self) {
        let mut depth = 1;
        while depth > 0 {
            match self.take().as_deref() {
                Some("(" | "[" | "{") => depth += 1,
                Some(")" | "]" | "}") => depth -= 1,
                Some(_) => {}
                None => return,
            }
        }
    }

    /// Reads a tree of imports below `before`.
    fn use_tree(&mut self, before: &mut Vec<String>, module: &mut Module) {
        let length = before.len();
        loop {
            match self.peek(0) {
                "::" => self.next += 1,
                "{" => {
                    self.next += 1;
                    while self.peek(0) != "}" && !self.peek(0).is_empty() {
                        self.use_tree(before, module);
                        if self.peek(0) == "," {
                            self.next += 1;
                        }
                    }
                    self.next += 1;
                    break;
                }
                "*" => {
                    self.next += 1;
                    module.paths.push(before.clone());
                    module.globs.push(before.clone());
                    break;
                }
                _ if self.is_name(0) => {
                    let name = self.take().expect("a name is next");
                    before.push(name);
                    if self.peek(0) != "::" {
                        self.import(before.clone(), module);
                        break;
                    }
                }
                _ => break,
            }
        }
        before.truncate(length);
    }

    fn import(&mut self, mut path: Vec<String>, module: &mut Module) {
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if self.peek(0) == "as" {
            self.next += 1;
            name = self.take().unwrap_or_default();
        }
        module.paths.push(path.clone());
        module.imports.insert(name, path);
    }

    /// Reads names joined by `::`.
    fn path(&mut self) -> Vec<String> {
        let mut path = vec![self.take().unwrap_or_default()];
        while self.peek(0) == "::" && self.is_name(1) {
            path.push(self.peek(1).to_owned());
            self.next += 2;
        }
        path
    }

    fn take(&mut self) -> Option<String> {
        let token = self.tokens.get(self.next).cloned();
        self.next += 1;
        token
    }

    fn peek(&self, ahead: usize) -> &str {
        let token = self.tokens.get(self.next + ahead);
        token.map_or("", String::as_str)
    }

    fn is_name(&self, ahead: usize) -> bool {
        self.peek(ahead).starts_with(is_of_name)
    }
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Splits text into names, numbers, strings and punctuation; `::` is one token.
fn tokens(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            '"' => quoted(rest),
            'r' | 'b' if raw(rest).is_some() => raw(rest).expect("it is one"),
            '\'' => character(rest),
            ':' if rest.starts_with("::") => 2,
            c if is_of_name(c) => rest.find(|c| !is_of_name(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (token, behind) = rest.split_at(length);
        if !first.is_whitespace() && !token.starts_with("//") && !token.starts_with("/*") {
            found.push(token.to_owned());
        }
        rest = behind;
    }
    found
}

/// Returns the length of the string literal at the start of `text`.
fn quoted(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let is_end = *c == '"' && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// Returns the length of the raw string literal at the start of `text`.
fn raw(text: &str) -> Option<usize> {
    let behind = text.strip_prefix('b').unwrap_or(text).strip_prefix('r')?;
    let marks = behind.len() - behind.trim_start_matches('#').len();
    let body = behind[marks..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(marks));
    let length = body.find(&end)? + end.len();
    Some(text.len() - body.len() + length)
}

/// Returns the length of the character literal at the start of `text`; 1 for a lifetime.
fn character(text: &str) -> usize {
    let mut behind = text.char_indices().skip(1);
    match (behind.next(), behind.next()) {
        (Some((_, '\\')), Some(_)) => {
            let end = text.char_indices().skip(3).find(|(_, c)| *c == '\'');
            end.map_or(text.len(), |(at, _)| at + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}
