//! Registers, which administrative writes change and barrier reads return.
//!
//! Each [`RegisterKey`] names a part of the state that is written and read as a whole.
//! [`Registers`] is the sequential specification: the result of one write after another, written
//! independently of `state`.

use std::collections::{BTreeMap, BTreeSet};

use state::RouterState;
use state::command::{Command, Rejection, Reply, UserSettings};
use state::discovery::{Discovery, DiscoveryChange};
use state::ids::ApiKeyId;
use state::keys::ApiKeySpec;

/// A part of the state that is written and read as a whole.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RegisterKey {
    /// A backend: whether it exists, its spec, and whether it drains.
    Backend(String),
    /// The routing policy.
    Policy,
    /// Routing settings other than the policy.
    Routing,
    /// Admission settings.
    Admission,
    /// Defaults of users.
    UserDefaults,
    /// Settings of a user.
    User(String),
    /// An API key without its secrets.
    ApiKey(ApiKeyId),
}

/// Text form of a key's value; `None` if it was never written or was removed.
pub type RegisterText = Option<String>;

/// Values of all registers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registers {
    held: BTreeMap<RegisterKey, Register>,
    /// Ids of API keys that were revoked for good, which are never reused.
    ended: BTreeSet<ApiKeyId>,
}

/// Value of one register.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Register {
    text: String,
    /// Whether a backend drains; `false` for other registers.
    draining: bool,
    /// Source of a backend and, while the backend is lost, whether an operator drains it.
    source: Option<(String, Option<bool>)>,
}

impl Register {
    fn new(text: String, draining: bool) -> Self {
        let source = None;
        Self {
            text,
            draining,
            source,
        }
    }
}

impl RegisterKey {
    /// Returns the keys that a command writes: none, one, or several at once.
    #[must_use]
    pub fn all_of(command: &Command) -> Vec<Self> {
        vec![match command {
            Command::ConfigureUser { name, .. } | Command::DeleteUser { name } => {
                Self::User(name.clone())
            }
            Command::CreateKey(spec) => Self::ApiKey(spec.id),
            Command::RevokeKey { id } => Self::ApiKey(*id),
            Command::Found(_) => {
                return vec![
                    Self::Policy,
                    Self::Routing,
                    Self::Admission,
                    Self::UserDefaults,
                ];
            }
            Command::PutUserDefaults(_) => Self::UserDefaults,
            Command::PutBackend(spec) => Self::Backend(spec.id.clone()),
            Command::Discover(discovery) => Self::Backend(discovery.change.backend().to_owned()),
            Command::DeleteBackend { name } | Command::SetDraining { name, .. } => {
                Self::Backend(name.clone())
            }
            Command::PutPolicy(_) => Self::Policy,
            Command::PutRouting(_) => Self::Routing,
            Command::PutAdmission(_) => Self::Admission,
            Command::Batch { .. }
            | Command::ExpireSession { .. }
            | Command::AssignReaders(_)
            | Command::BeginRestore { .. }
            | Command::RestorePart { .. }
            | Command::FinishRestore { .. }
            | Command::AbortRestore { .. }
            | Command::ForgiveUser { .. }
            | Command::RotateKey { .. }
            | Command::EndTree { .. }
            | Command::SetRanks { .. } => return Vec::new(),
        }]
    }

    /// Returns the value of this key in a state.
    #[must_use]
    pub fn value_in(&self, state: &RouterState) -> RegisterText {
        let view = state.view();
        let registry = view.registry();
        let founded = |text: String| registry.initialised.then_some(text);
        match self {
            Self::Backend(name) => state
                .backend(name)
                .map(|it| backend(&format!("{:?}", it.spec), it.draining)),
            Self::Policy => founded(format!("{:?}", registry.policy)),
            Self::Routing => founded(format!("{:?}", registry.routing)),
            Self::Admission => founded(format!("{:?}", registry.admission)),
            Self::UserDefaults => founded(format!("{:?}", registry.user_defaults)),
            Self::User(name) => user(&state.user_named(name)?.own),
            Self::ApiKey(id) => view.keys().get(*id).map(|key| format!("{:?}", key.spec)),
        }
    }
}

impl Registers {
    /// Returns the value of a register.
    #[must_use]
    pub fn value(&self, key: &RegisterKey) -> RegisterText {
        let register = self.held.get(key)?;
        Some(match key {
            RegisterKey::Backend(_) => backend(&register.text, register.draining),
            RegisterKey::Policy
            | RegisterKey::Routing
            | RegisterKey::Admission
            | RegisterKey::UserDefaults
            | RegisterKey::User(_)
            | RegisterKey::ApiKey(_) => register.text.clone(),
        })
    }

    /// Returns all registers that have a value, with the value.
    pub fn iter(&self) -> impl Iterator<Item = (&RegisterKey, RegisterText)> {
        self.held.keys().map(|key| (key, self.value(key)))
    }

    /// Applies one write and returns the reply to its writer. Commands that write no register
    /// change nothing.
    pub fn write(&mut self, command: &Command) -> Reply {
        if let Err(reject) = validate(command) {
            return Reply::Rejected(reject);
        }
        if let Command::Found(founding) = command {
            if self.held.contains_key(&RegisterKey::Policy) {
                return Reply::Rejected(Rejection::AlreadyInitialised);
            }
            self.write(&Command::PutPolicy(founding.policy.clone()));
            self.write(&Command::PutRouting(founding.routing.clone()));
            self.write(&Command::PutAdmission(founding.admission.clone()));
            let defaults = Box::new(founding.user_defaults.clone());
            return self.write(&Command::PutUserDefaults(defaults));
        }
        match command {
            Command::CreateKey(spec) => self.create_key(spec),
            // A rotation changes only secrets.
            Command::RotateKey { id, .. } => {
                match self.held.contains_key(&RegisterKey::ApiKey(*id)) {
                    true => Reply::Applied,
                    false => Reply::Rejected(Rejection::UnknownKey { id: *id }),
                }
            }
            Command::RevokeKey { id } => {
                let reply = self.revoke_key(*id);
                if reply == Reply::Applied {
                    self.ended.insert(*id);
                }
                reply
            }
            _ => self.write_one(command),
        }
    }

    /// Applies a command that writes at most one register, and returns its reply.
    fn write_one(&mut self, command: &Command) -> Reply {
        let Some(key) = RegisterKey::all_of(command).pop() else {
            return Reply::Applied;
        };
        let text = match command {
            Command::Discover(discovery) => return self.discover(discovery),
            Command::PutBackend(spec) => {
                let draining = self.held.get(&key).is_some_and(Register::drains_by_hand);
                let text = format!("{spec:?}");
                self.held.insert(key, Register::new(text, draining));
                return Reply::Applied;
            }
            Command::DeleteBackend { name } => {
                return match self.held.remove(&key) {
                    Some(_) => Reply::Applied,
                    None => unknown(name),
                };
            }
            Command::SetDraining { name, draining, .. } => {
                let Some(register) = self.held.get_mut(&key) else {
                    return unknown(name);
                };
                register.draining = *draining;
                if let Some((_, Some(drains_anyway))) = &mut register.source {
                    *drains_anyway = *draining;
                }
                return Reply::Applied;
            }
            Command::PutPolicy(policy) => format!("{policy:?}"),
            Command::PutRouting(settings) => format!("{settings:?}"),
            Command::PutAdmission(settings) => format!("{settings:?}"),
            Command::PutUserDefaults(defaults) => format!("{defaults:?}"),
            Command::ConfigureUser { settings, .. } => match user(settings) {
                Some(text) => text,
                None => {
                    self.held.remove(&key);
                    return Reply::Applied;
                }
            },
            Command::DeleteUser { .. } => {
                self.held.remove(&key);
                return Reply::Applied;
            }
            // These commands write no key.
            _ => return Reply::Applied,
        };
        let draining = false;
        self.held.insert(key, Register::new(text, draining));
        Reply::Applied
    }
}

impl Register {
    /// Returns whether an operator drains the backend, apart from its source.
    fn drains_by_hand(&self) -> bool {
        match self.source {
            Some((_, Some(drains_anyway))) => drains_anyway,
            Some((_, None)) | None => self.draining,
        }
    }
}

impl Registers {
    /// Returns whether the backend `name` drains.
    pub(super) fn drains(&self, name: &str) -> bool {
        let key = RegisterKey::Backend(name.to_owned());
        self.held.get(&key).is_some_and(|it| it.draining)
    }

    fn discover(&mut self, discovery: &Discovery) -> Reply {
        let name = discovery.change.backend();
        let key = RegisterKey::Backend(name.to_owned());
        let Some(register) = self.held.get_mut(&key) else {
            let DiscoveryChange::Found(spec) = &discovery.change else {
                return unknown(name);
            };
            let mut register = Register::new(format!("{spec:?}"), false);
            register.source = Some((discovery.source.clone(), None));
            self.held.insert(key, register);
            return Reply::Applied;
        };
        let drains = register.draining;
        let refused = Reply::Rejected(Rejection::NotOfSource {
            name: name.to_owned(),
        });
        let lost = match &mut register.source {
            Some((source, lost)) if *source == discovery.source => lost,
            Some(_) | None => return refused,
        };
        match &discovery.change {
            DiscoveryChange::Found(spec) => {
                register.draining = lost.take().unwrap_or(drains);
                register.text = format!("{spec:?}");
            }
            DiscoveryChange::Lost { .. } if lost.is_none() => {
                *lost = Some(drains);
                register.draining = true;
            }
            DiscoveryChange::Lost { .. } => {}
            DiscoveryChange::Forgotten { .. } if lost.is_none() => return refused,
            DiscoveryChange::Forgotten { .. } => drop(self.held.remove(&key)),
        }
        Reply::Applied
    }

    fn create_key(&mut self, spec: &ApiKeySpec) -> Reply {
        let (id, key) = (spec.id, RegisterKey::ApiKey(spec.id));
        if self.held.contains_key(&key) || self.ended.contains(&id) {
            return Reply::Rejected(Rejection::KeyTaken { id });
        }
        let (text, draining) = (format!("{spec:?}"), false);
        self.held.insert(key, Register::new(text, draining));
        Reply::Applied
    }

    fn revoke_key(&mut self, id: ApiKeyId) -> Reply {
        match self.held.remove(&RegisterKey::ApiKey(id)) {
            Some(_) => Reply::Applied,
            None => Reply::Rejected(Rejection::UnknownKey { id }),
        }
    }
}

/// Rejects commands that no state accepts, whatever its contents.
fn validate(command: &Command) -> Result<(), Rejection> {
    match command {
        Command::PutBackend(spec) => spec.validate(),
        Command::Discover(discovery) => discovery.validate(),
        Command::PutPolicy(policy) => policy.validate(),
        Command::PutRouting(settings) => settings.validate(),
        Command::PutAdmission(settings) => settings.validate(),
        Command::ConfigureUser { settings, .. } => settings.validate(),
        Command::PutUserDefaults(defaults) => defaults.validate(),
        Command::Found(founding) => founding.validate(),
        _ => Ok(()),
    }
}

/// Formats the settings of a user as a register's text; `None` if nothing is set. Limits and budgets
/// without any bound count as not set.
pub(super) fn user(settings: &UserSettings) -> RegisterText {
    let mut settings = settings.clone();
    settings.limits = settings.limits.filter(|limits| !limits.is_unbounded());
    settings.budget = settings.budget.filter(|budget| !budget.is_unbounded());
    (settings != UserSettings::default()).then(|| format!("{settings:?}"))
}

fn backend(spec: &str, draining: bool) -> String {
    format!("draining: {draining}, {spec}")
}

fn unknown(name: &str) -> Reply {
    Reply::Rejected(Rejection::UnknownBackend {
        name: name.to_owned(),
    })
}
