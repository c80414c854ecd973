//! YAML as a tree of texts with their lines. Values stay as written, because each router reads them
//! in its own way. Aliases are not followed, because they can make a small file very large.

use saphyr_parser::{Event, Parser};

use super::source::{Fault, Setting};

/// Deepest nesting that is read.
const DEPTH_MAX: usize = 64;

/// A value in YAML.
pub(super) struct Node {
    pub(super) kind: NodeKind,
    /// Its line, counted from 1.
    pub(super) line: usize,
}

pub(super) enum NodeKind {
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
    /// Filled in from elsewhere, like a variable of a shell.
    Alias,
}

impl Node {
    pub(super) fn text(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Text(text) => Some(text),
            NodeKind::Alias => Some("$"),
            NodeKind::List(_) | NodeKind::Map(_) => None,
        }
    }

    /// Returns the entries of a map; none of anything else.
    pub(super) fn entries(&self) -> &[(String, Self)] {
        match &self.kind {
            NodeKind::Map(entries) => entries,
            NodeKind::Text(_) | NodeKind::List(_) | NodeKind::Alias => &[],
        }
    }

    /// Returns the elements of a list; none of anything else.
    pub(super) fn elements(&self) -> &[Self] {
        match &self.kind {
            NodeKind::List(elements) => elements,
            NodeKind::Text(_) | NodeKind::Map(_) | NodeKind::Alias => &[],
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let mut entries = self.entries().iter();
        entries.find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// Adds each text at or below this node, named by its path from `path`.
    pub(super) fn leaves(&self, path: &str, settings: &mut Vec<Setting>) {
        match &self.kind {
            NodeKind::Text(text) => {
                settings.push(Setting::new(path, vec![text.clone()], self.line));
            }
            NodeKind::Alias => settings.push(Setting::new(path, vec!["$".to_owned()], self.line)),
            NodeKind::List(elements) => elements.iter().for_each(|it| it.leaves(path, settings)),
            NodeKind::Map(entries) => {
                for (key, node) in entries {
                    node.leaves(&format!("{path}.{key}"), settings);
                }
            }
        }
    }

    /// Calls `visit` with this node and all below it.
    pub(super) fn walk<'a>(&'a self, visit: &mut dyn FnMut(&'a Self)) {
        visit(self);
        self.elements().iter().for_each(|it| it.walk(visit));
        self.entries().iter().for_each(|(_, it)| it.walk(visit));
    }
}

/// Whether a text without a name looks like YAML: its first line is a key or an element of a list.
pub(super) fn is_likely(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let word = first.and_then(|line| line.split_whitespace().next());
    word.is_some_and(|word| word.ends_with(':') || ["-", "---"].contains(&word))
}

/// Reads all documents of a text that begins at line `first` of its file.
pub(super) fn documents(text: &str, first: usize) -> Result<Vec<Node>, Fault> {
    let mut documents = Vec::new();
    let mut open: Vec<Builder> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let line = first + error.marker().line().saturating_sub(1);
            Fault::new(line, error.info(), "valid YAML")
        })?;
        let line = first + span.start.line().saturating_sub(1);
        let done = match event {
            Event::Scalar(text, ..) => Some(Node {
                kind: NodeKind::Text(text.into_owned()),
                line,
            }),
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                if open.len() == DEPTH_MAX {
                    let message = format!("YAML nested more than {DEPTH_MAX} deep");
                    return Err(Fault::new(line, &message, "less nesting"));
                }
                open.push(Builder::new(matches!(event, Event::MappingStart(..)), line));
                None
            }
            Event::SequenceEnd | Event::MappingEnd => open.pop().map(Builder::done),
            Event::Alias(_) => Some(Node {
                kind: NodeKind::Alias,
                line,
            }),
            _ => None,
        };
        let Some(done) = done else { continue };
        match open.last_mut() {
            Some(builder) => builder.add(done)?,
            None => documents.push(done),
        }
    }
    Ok(documents)
}

/// A list or a map that is still read.
struct Builder {
    node: Node,
    /// The key whose value comes next.
    key: Option<String>,
}

impl Builder {
    fn new(is_map: bool, line: usize) -> Self {
        let kind = match is_map {
            true => NodeKind::Map(Vec::new()),
            false => NodeKind::List(Vec::new()),
        };
        let (node, key) = (Node { kind, line }, None);
        Self { node, key }
    }

    fn add(&mut self, value: Node) -> Result<(), Fault> {
        match (&mut self.node.kind, self.key.take()) {
            (NodeKind::Map(entries), Some(key)) if entries.iter().any(|(it, _)| *it == key) => {
                let message = format!("`{key}` is set twice");
                return Err(Fault::new(value.line, &message, "each key once"));
            }
            (NodeKind::Map(entries), Some(key)) => entries.push((key, value)),
            (NodeKind::Map(_), None) => {
                self.key = Some(value.text().unwrap_or_default().to_owned());
            }
            (NodeKind::List(elements), _) => elements.push(value),
            (NodeKind::Text(_) | NodeKind::Alias, _) => {}
        }
        Ok(())
    }

    fn done(self) -> Node {
        self.node
    }
}
