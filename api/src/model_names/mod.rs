//! Names of models: aliases, fallbacks and splits, and which model serves a requested name.
//!
//! [`ModelNames::resolve`] is the only place that decides this. It is a pure function of the
//! config, the keys of the request and which models can be served, so that replicas with the same
//! config choose the same model for the same key (I171).
//!
//! A split divides by weighted rendezvous hashing (Thaler and Ravishankar, "Using Name-Based
//! Mappings to Increase Hit Rates", 1998), with integers only: each target draws as many hashes of
//! the key as its weight, and the target with the highest hash gets the request. A weight that
//! grows by one adds one draw, so only requests that this draw wins change their model.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

#[cfg(test)]
mod tests;

/// Stands in metrics and usage for models that no backend names.
pub const OTHER_MODEL: &str = "other";
/// Maximum sum of the weights of a split.
pub const SPLIT_WEIGHTS_MAX: u32 = 1000;
/// Maximum number of fallbacks behind a model.
pub const FALLBACKS_MAX: usize = 8;

/// What a split keeps together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, Hash)]
#[serde(rename_all = "kebab-case")]
pub enum SplitBy {
    /// All requests of a user; those without a user are divided one by one.
    #[default]
    User,
    /// All requests of a session; those without one go by their user.
    Session,
    /// Nothing: each request by its id.
    Request,
}

/// The names that the config gives to models. Every name is resolved: a target is a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelNames {
    /// Model of each alias.
    pub aliases: BTreeMap<String, String>,
    /// Model that serves the requests of another one that has no engine.
    pub fallbacks: BTreeMap<String, String>,
    /// Splits by name.
    pub splits: BTreeMap<String, ModelSplit>,
}

/// A name that is divided among models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSplit {
    by: SplitBy,
    targets: Vec<SplitTarget>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SplitTarget {
    model: String,
    /// A seed for each draw, as many as the weight.
    seeds: Vec<u64>,
}

/// Keys by which a request can be assigned to a target.
#[derive(Debug, Clone, Copy)]
pub struct SplitKeys<'a> {
    /// Hash of the user; `None` if the request names none.
    pub user: Option<u64>,
    /// Hash of the session; `None` if the request names none.
    pub session: Option<u64>,
    /// Id of the request.
    pub request_id: &'a str,
}

/// How sure it is that an engine can serve a model, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelHealth {
    /// No engine can.
    Down,
    /// Engines can only if their failed probes are wrong.
    Doubtful,
    /// The probes of an engine pass.
    Healthy,
}

/// How a requested name became the model that serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ResolvedModel {
    /// Name that the request gives.
    pub requested: String,
    /// Model that the name stands for, by alias or split.
    pub meant: String,
    /// Model that serves the request: the one meant, or a fallback of it.
    pub model: String,
    /// What the split went by; `null`: the name is no split.
    pub split_by: Option<SplitBy>,
    /// Whether no engine could serve the model that is meant, so that a fallback does.
    pub is_fallback: bool,
}

impl ResolvedModel {
    /// Whether a later request with the same name, user and session may get another model.
    #[must_use]
    pub fn is_momentary(&self) -> bool {
        self.is_fallback || self.split_by == Some(SplitBy::Request)
    }
}

impl ModelSplit {
    /// Creates the split `name` among `targets`, each with its weight.
    #[must_use]
    pub fn new(name: &str, by: SplitBy, targets: &[(String, u32)]) -> Self {
        let target = |(model, weight): &(String, u32)| SplitTarget {
            model: model.clone(),
            seeds: (0..*weight)
                .map(|draw| xxh3_64(format!("{name}\0{model}\0{draw}").as_bytes()))
                .collect(),
        };
        Self {
            by,
            targets: targets.iter().map(target).collect(),
        }
    }

    /// Returns the models of the split.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.targets.iter().map(|target| &*target.model)
    }

    /// Returns the model for `key`; `None` for a split without targets.
    fn choose(&self, key: u64) -> Option<&str> {
        let key = key.to_le_bytes();
        let highest = |target: &SplitTarget| {
            let draws = target.seeds.iter();
            draws.map(|seed| xxh3_64_with_seed(&key, *seed)).max()
        };
        // Equal hashes are settled by name, not by order in the config.
        let best = (self.targets.iter()).max_by_key(|target| (highest(target), &target.model))?;
        Some(&best.model)
    }
}

impl SplitKeys<'_> {
    /// Returns the key of the request for a split by `by`, and what it identifies.
    fn of(&self, by: SplitBy) -> (SplitBy, u64) {
        let user = || self.user.map(|key| (SplitBy::User, key));
        let found = match by {
            SplitBy::Session => self.session.map(|key| (by, key)).or_else(user),
            SplitBy::User => user(),
            SplitBy::Request => None,
        };
        found.unwrap_or_else(|| (SplitBy::Request, xxh3_64(self.request_id.as_bytes())))
    }
}

impl ModelNames {
    /// Returns the model that serves a request for the name `requested`; `None` if the name is that
    /// of the model. `may_use` says whether the request's user may use a model; it is asked for
    /// fallbacks only. Among the model and its fallbacks, the first healthy one serves, else the first
    /// doubtful one: an engine that fails its probes is tried only if nothing else is left.
    #[must_use]
    pub fn resolve<'a>(
        &self,
        requested: &str,
        keys: impl FnOnce() -> SplitKeys<'a>,
        health: impl Fn(&str) -> ModelHealth,
        may_use: impl Fn(&str) -> bool,
    ) -> Option<ResolvedModel> {
        let (split_by, meant) = match self.splits.get(requested) {
            Some(split) => {
                let (by, key) = keys().of(split.by);
                (Some(by), split.choose(key)?)
            }
            None => (None, self.model(requested)),
        };
        let usable = || self.behind(meant).filter(|it| may_use(it));
        let first = |least| {
            let mut models = std::iter::once(meant).chain(usable());
            models.find(|it| health(it) >= least)
        };
        let model = match self.fallbacks.contains_key(meant) {
            true => first(ModelHealth::Healthy).or_else(|| first(ModelHealth::Doubtful)),
            false => None,
        };
        let model = model.unwrap_or(meant);
        (model != requested).then(|| ResolvedModel {
            requested: requested.to_owned(),
            meant: meant.to_owned(),
            model: model.to_owned(),
            split_by,
            is_fallback: model != meant,
        })
    }

    /// Returns the model of an alias, and every other name as it is.
    fn model<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases.get(name).map_or(name, |model| model)
    }

    /// Returns the fallbacks of a model, in order.
    pub fn behind(&self, model: &str) -> impl Iterator<Item = &str> {
        let next = |model: &str| self.fallbacks.get(model).map(|next| &**next);
        std::iter::successors(next(model), move |model| next(model)).take(FALLBACKS_MAX)
    }

    /// Returns the models that a name may stand for, without fallbacks.
    #[must_use]
    pub fn meant<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        match self.splits.get(name) {
            Some(split) => split.models().collect(),
            None => vec![self.model(name)],
        }
    }

    /// Returns the names that the config adds: aliases, splits, and models with a fallback.
    pub fn added(&self) -> impl Iterator<Item = &str> {
        let names = self.aliases.keys().chain(self.splits.keys());
        names.chain(self.fallbacks.keys()).map(String::as_str)
    }
}
