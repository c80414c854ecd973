//! `EndpointPickerConfig` of llm-d's router and, before it, of the Gateway API Inference Extension.
//!
//! Settings are named by their path, without `spec` and positions: `flowControl.maxRequests`. A
//! plugin is named by its type, its parameters by `TYPE.PARAMETER`, its weight by `TYPE.weight`.

use std::collections::BTreeMap;

use super::source::{Fault, Setting};
use super::words::{Found, aliases};
use super::yaml::{self, Node, NodeKind};

/// Reads the settings of every `EndpointPickerConfig` in a file: a document of its own, or text in
/// another one, such as a ConfigMap or the values of a chart.
pub(super) fn read(text: &str) -> Result<Found, Fault> {
    let mut found = Found::default();
    let mut is_found = false;
    for document in yaml::documents(text, 1)? {
        configs(&document, &mut |config| {
            is_found = true;
            config.walk(&mut |node| aliases(node, &mut found));
            settings_of(config, &mut found)
        })?;
    }
    if !is_found {
        let message = "no EndpointPickerConfig is in the file";
        let expected = "YAML with `kind: EndpointPickerConfig`, also within a ConfigMap";
        return Err(Fault::new(1, message, expected));
    }
    whole_weights(&mut found.settings);
    Ok(found)
}

/// Calls `found` with each config at or below `node`.
fn configs(node: &Node, found: &mut dyn FnMut(&Node) -> Result<(), Fault>) -> Result<(), Fault> {
    match &node.kind {
        NodeKind::Map(_) if node.get("kind").and_then(Node::text) == Some(KIND) => found(node),
        NodeKind::Map(entries) => entries.iter().try_for_each(|(_, it)| configs(it, found)),
        NodeKind::List(entries) => entries.iter().try_for_each(|it| configs(it, found)),
        NodeKind::Text(text) if text.contains('\n') && text.contains(KIND) => {
            let mut documents = yaml::documents(text, node.line)?.into_iter();
            documents.try_for_each(|it| configs(&it, found))
        }
        NodeKind::Text(_) | NodeKind::Alias => Ok(()),
    }
}

const KIND: &str = "EndpointPickerConfig";

fn settings_of(config: &Node, found: &mut Found) -> Result<(), Fault> {
    let plugins = list(config, "plugins")?;
    let profiles = list(config, "schedulingProfiles")?;
    let mut types = BTreeMap::new();
    for plugin in plugins {
        types.insert(name_of(plugin)?, type_of(plugin)?);
    }
    // Types of the plugins of each profile.
    let mut used = Vec::new();
    for profile in profiles {
        used.push(profile_of(profile, &types, found)?);
    }
    let is_picker = |kind: &str| kind.ends_with("-picker");
    // A profile without a picker takes one that is listed.
    let is_whole = |kinds: &Vec<&str>| kinds.iter().any(|kind| is_picker(kind));
    let are_whole = !used.is_empty() && used.iter().all(is_whole);
    for plugin in plugins {
        let kind = type_of(plugin)?;
        if is_picker(kind) && are_whole && !used.iter().flatten().any(|it| *it == kind) {
            let told = format!("`{kind}`, which no profile refers to");
            found.unread.push((plugin.line, told));
            continue;
        }
        let settings = &mut found.settings;
        settings.push(Setting::new(kind, Vec::new(), plugin.line));
        // Without profiles there is one of all plugins, each with weight 1.
        if profiles.is_empty() && kind.ends_with("-scorer") {
            settings.push(weight_of(kind, "1", plugin.line));
        }
        for (key, node) in plugin.entries() {
            match key.as_str() {
                "type" | "name" => {}
                "parameters" => node.leaves(kind, settings),
                _ => node.leaves(&format!("plugins.{key}"), settings),
            }
        }
    }
    for (key, node) in config.entries() {
        match key.as_str() {
            "apiVersion" | "kind" | "metadata" | "plugins" | "schedulingProfiles" => {}
            "featureGates" => {
                for gate in list(config, "featureGates")? {
                    let text = gate.text().unwrap_or_default();
                    let (gate_name, value) = text.split_once('=').unwrap_or((text, "true"));
                    let name = format!("featureGates.{gate_name}");
                    let setting = Setting::new(&name, vec![value.to_owned()], gate.line);
                    found.settings.push(setting);
                }
            }
            _ => node.leaves(key, &mut found.settings),
        }
    }
    Ok(())
}

/// Adds the weights in a profile. Returns the types of its plugins.
fn profile_of<'a>(
    profile: &'a Node,
    types: &BTreeMap<&str, &'a str>,
    found: &mut Found,
) -> Result<Vec<&'a str>, Fault> {
    let settings = &mut found.settings;
    let mut kinds = Vec::new();
    for plugin in list(profile, "plugins")? {
        let Some(name) = plugin.get("pluginRef").and_then(Node::text) else {
            let (message, expected) = (
                "a profile's plugin has no name",
                "`pluginRef` with a plugin's name",
            );
            return Err(Fault::new(plugin.line, message, expected));
        };
        let kind = types.get(name).copied().unwrap_or(name);
        kinds.push(kind);
        let weight = plugin.get("weight").and_then(Node::text);
        if weight.is_some() || kind.ends_with("-scorer") {
            settings.push(weight_of(kind, weight.unwrap_or("1"), plugin.line));
        }
        let known = ["pluginRef", "weight"];
        others(plugin, &known, "schedulingProfiles.plugins", settings);
    }
    others(
        profile,
        &["name", "plugins"],
        "schedulingProfiles",
        settings,
    );
    Ok(kinds)
}

/// Adds the fields of a node that are not among `known`.
fn others(node: &Node, known: &[&str], path: &str, settings: &mut Vec<Setting>) {
    for (key, node) in node.entries() {
        if !known.contains(&key.as_str()) {
            node.leaves(&format!("{path}.{key}"), settings);
        }
    }
}

fn weight_of(kind: &str, weight: &str, line: usize) -> Setting {
    Setting::new(&format!("{kind}.weight"), vec![weight.to_owned()], line)
}

fn type_of(plugin: &Node) -> Result<&str, Fault> {
    let kind = plugin.get("type").and_then(Node::text);
    let expected = "`type` with the plugin's type";
    kind.filter(|kind| !kind.is_empty())
        .ok_or_else(|| Fault::new(plugin.line, "a plugin has no type", expected))
}

fn name_of(plugin: &Node) -> Result<&str, Fault> {
    match plugin.get("name").and_then(Node::text) {
        Some(name) => Ok(name),
        None => type_of(plugin),
    }
}

/// Returns the entries of the list `key`, which may be missing.
fn list<'a>(node: &'a Node, key: &str) -> Result<&'a [Node], Fault> {
    match node.get(key).map(|it| (&it.kind, it.line)) {
        None => Ok(&[]),
        Some((NodeKind::List(entries), _)) => Ok(entries),
        Some((NodeKind::Text(text), _)) if text.is_empty() => Ok(&[]),
        Some((_, line)) => {
            let message = format!("`{key}` is not a list");
            Err(Fault::new(
                line,
                &message,
                "a list, each entry behind a `-`",
            ))
        }
    }
}

/// Multiplies all weights by the same power of ten, so that they are integers as here.
fn whole_weights(settings: &mut [Setting]) {
    let mut weights: Vec<_> = settings
        .iter_mut()
        .filter(|it| it.name.ends_with(".weight"))
        .filter_map(|it| Some((it.values.first()?.parse::<f64>().ok()?, it)))
        .collect();
    let is_whole = |scale: f64| {
        let scaled = weights.iter().map(|(weight, _)| weight * scale);
        scaled.into_iter().all(|it| (it - it.round()).abs() < 1e-6)
    };
    let scales = [1.0, 10.0, 100.0];
    let scale = scales.into_iter().find(|scale| is_whole(*scale));
    for (weight, setting) in &mut weights {
        setting.values = vec![format!("{}", (*weight * scale.unwrap_or(100.0)).round())];
    }
}
