//! Checks of the names of models: `aliases` and `fallback` of `[[models]]`, and `[[splits]]`.

use std::collections::{BTreeMap, BTreeSet};

use api::model_names::{FALLBACKS_MAX, ModelNames, ModelSplit, SPLIT_WEIGHTS_MAX};

use super::file::{ConfigFile, ModelConfig, SplitConfig};
use super::read::Settings;

/// What a target must be.
const A_MODEL: &str = "the name or an alias of a [[models]] entry, or a model that [[backends]] or [[discovery]] name";

/// Names of the config, and where each is given.
#[derive(Default)]
struct GivenNames<'a> {
    places: BTreeMap<&'a str, String>,
    aliases: BTreeMap<String, String>,
    splits: BTreeSet<&'a str>,
    /// Models that backends and sources of backends name.
    served: BTreeSet<&'a str>,
}

/// Returns the names that the config gives to models.
pub(super) fn names(file: &ConfigFile, found: &mut Settings) -> ModelNames {
    let of_backends = file.backends.iter().flat_map(|it| &it.models);
    let of_sources = file.discovery.iter().flat_map(|it| &it.models);
    let served = of_backends.chain(of_sources).map(String::as_str);
    let mut given = GivenNames {
        served: served.filter(|model| *model != "*").collect(),
        ..GivenNames::default()
    };
    for (nth, model) in file.models.iter().enumerate() {
        let place = format!("models[{nth}].name");
        given.places.entry(&model.name).or_insert(place);
    }
    for (nth, model) in file.models.iter().enumerate() {
        given.add_aliases(nth, model, found);
    }
    for (nth, split) in file.splits.iter().enumerate() {
        given.add_split(nth, split, found);
    }
    for (nth, price) in file.prices.iter().enumerate() {
        given.check_price(&format!("prices[{nth}].name"), &price.name, found);
    }
    let splits = file.splits.iter().enumerate();
    let splits = splits.filter_map(|(nth, split)| given.split(nth, split, found));
    let splits = splits.collect();
    ModelNames {
        splits,
        fallbacks: given.fallbacks(&file.models, found),
        aliases: given.aliases,
    }
}

impl<'a> GivenNames<'a> {
    /// Notes that `name` is given at `path`, unless it is given elsewhere or is `*`.
    fn give(&mut self, name: &'a str, (path, key): (&str, &str), found: &mut Settings) -> bool {
        if !found.is_sound(key) {
            return false;
        }
        if name == "*" {
            let message = format!("{path} is \"*\", which stands for any model");
            found.refuse(key, message, "a name");
            return false;
        }
        if let Some(other) = self.places.get(name) {
            let message = format!("{path} is {name:?}, as is {other}");
            found.refuse(
                key,
                message,
                "each name once among models, aliases and splits",
            );
            return false;
        }
        self.places.insert(name, path.to_owned());
        true
    }

    fn add_aliases(&mut self, nth: usize, model: &'a ModelConfig, found: &mut Settings) {
        let key = format!("models[{nth}].aliases");
        if model.name == "*" && !model.aliases.is_empty() {
            let message = format!("{key} is set for the model \"*\"");
            found.refuse(&key, message, "aliases of a model with a name");
            return;
        }
        for (at, alias) in model.aliases.iter().enumerate() {
            if self.give(alias, (&format!("{key}[{at}]"), &key), found) {
                self.aliases.insert(alias.clone(), model.name.clone());
            }
        }
    }

    fn add_split(&mut self, nth: usize, split: &'a SplitConfig, found: &mut Settings) {
        let key = format!("splits[{nth}].model");
        if self.give(&split.model, (&key, &key), found) {
            self.splits.insert(&split.model);
        }
    }

    /// Refuses the price of a name under which no usage is counted.
    fn check_price(&self, path: &str, name: &str, found: &mut Settings) {
        if !found.is_sound(path) {
            return;
        }
        let (fault, expected) = if let Some(model) = self.aliases.get(name) {
            let fault = format!("an alias of {model:?}");
            (fault, format!("{model:?}, the model that serves"))
        } else if let Some(split) = self.places.get(name).filter(|_| self.splits.contains(name)) {
            let fault = format!("the split of {split}");
            (fault, "a price for each of its models".to_owned())
        } else if name == "*" {
            ("no model".to_owned(), "a price for each model".to_owned())
        } else {
            return;
        };
        found.refuse(path, format!("{path} is {name:?}, {fault}"), &expected);
    }

    /// Returns the model that `name`, given at `path`, stands for; `None` if it stands for none.
    fn target(&self, name: &str, path: &str, found: &mut Settings) -> Option<String> {
        if !found.is_sound(path) {
            return None;
        }
        if let Some(model) = self.aliases.get(name) {
            return Some(model.clone());
        }
        if self.splits.contains(name) {
            let split = &self.places[name];
            let message = format!("{path} is {name:?}, the split of {split}");
            found.refuse(path, message, "a model, not a split");
            return None;
        }
        let is_known = name != "*" && self.places.contains_key(name) || self.served.contains(name);
        if !is_known {
            let message = format!("{path} is {name:?}, which is no model of this config");
            found.refuse(path, message, A_MODEL);
            return None;
        }
        Some(name.to_owned())
    }

    /// Returns a split with its name; `None` if it has an error.
    fn split(
        &self,
        nth: usize,
        split: &SplitConfig,
        found: &mut Settings,
    ) -> Option<(String, ModelSplit)> {
        let path = format!("splits[{nth}].to");
        if split.to.is_empty() && found.is_sound(&path) {
            let is_set = found.places.contains_key(&path);
            let key = if is_set {
                path.clone()
            } else {
                format!("splits[{nth}]")
            };
            let expected = "the models, such as [{ model = \"a\", weight = 9 }, { model = \"b\" }]";
            found.refuse(&key, format!("{path} is empty"), expected);
            return None;
        }
        let mut targets: Vec<(String, u32)> = Vec::new();
        for (at, target) in split.to.iter().enumerate() {
            let key = format!("{path}[{at}].model");
            let Some(model) = self.target(&target.model, &key, found) else {
                continue;
            };
            if let Some(first) = targets.iter().position(|(other, _)| *other == model) {
                let message = format!("{key} is the model {model:?}, as is {path}[{first}].model");
                found.refuse(&key, message, "each model once, with all its weight");
            }
            targets.push((model, target.weight));
        }
        let sum: u32 = split
            .to
            .iter()
            .map(|it| it.weight.min(SPLIT_WEIGHTS_MAX))
            .sum();
        if sum > SPLIT_WEIGHTS_MAX {
            let message = format!("the weights of {path} sum to {sum}");
            let expected =
                format!("weights in the same proportion that sum to at most {SPLIT_WEIGHTS_MAX}");
            found.refuse(&path, message, &expected);
            return None;
        }
        let is_whole = targets.len() == split.to.len();
        is_whole.then(|| {
            let made = ModelSplit::new(&split.model, split.by, &targets);
            (split.model.clone(), made)
        })
    }

    /// Returns the fallback of each model that has one. Refuses chains that end nowhere.
    fn fallbacks(&self, models: &[ModelConfig], found: &mut Settings) -> BTreeMap<String, String> {
        let mut fallbacks = ModelNames::default();
        let mut keys = Vec::new();
        for (nth, model) in models.iter().enumerate() {
            let key = format!("models[{nth}].fallback");
            let Some(fallback) = &model.fallback else {
                continue;
            };
            if model.name == "*" {
                let message = format!("{key} is set for the model \"*\"");
                found.refuse(&key, message, "a fallback of a model with a name");
            } else if let Some(target) = self.target(fallback, &key, found) {
                fallbacks.fallbacks.insert(model.name.clone(), target);
                keys.push((key, &model.name));
            }
        }
        for (key, model) in keys {
            let behind: Vec<_> = fallbacks.behind(model).collect();
            if let Some(at) = behind.iter().position(|it| it == model) {
                let way = behind[..=at].join("\", \"");
                let message = format!("{key} leads back to its own model: \"{model}\", \"{way}\"");
                found.refuse(&key, message, "fallbacks without a cycle");
                continue;
            }
            // A model that leads into the cycle of others is not at fault.
            let is_cycle = behind.iter().collect::<BTreeSet<_>>().len() < behind.len();
            let has_next = |it: &&str| fallbacks.fallbacks.contains_key(*it);
            if !is_cycle && behind.last().is_some_and(has_next) {
                let message = format!("more than {FALLBACKS_MAX} fallbacks follow {key}");
                found.refuse(&key, message, &format!("at most {FALLBACKS_MAX}"));
            }
        }
        fallbacks.fallbacks
    }
}
