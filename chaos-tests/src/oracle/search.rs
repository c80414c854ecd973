//! Linearizability by search: stateright's `LinearizabilityTester`, key by key.
//!
//! The search uses only the responses to clients, neither log nor index: some order of the
//! operations must explain every response. A write of unknown outcome is one that was called and
//! has not returned.
//!
//! The worst case is exponential, so the search is bounded. It cuts a key's history at a read that
//! overlaps no other operation, whose value starts the next piece. Writes of unknown outcome carry
//! over into all later pieces (which allows them more than once; the witness check of
//! [`super::linear`] does not). The search covers only the first [`OPERATIONS_MAX`] operations of a
//! piece, which is sound because every prefix of a linearizable history is linearizable. A piece
//! with more than [`UNKNOWN_MAX`] unknown outcomes, or whose search takes more than [`STEPS_MAX`]
//! steps, is counted as undecided.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

use super::history::{Action, History, Operation, OperationResult};
use super::register::{RegisterKey, RegisterText, user};
use state::command::{Command, Rejection, Reply};
use state::discovery::DiscoveryChange;

/// Maximum number of operations that are searched in one piece.
pub const OPERATIONS_MAX: usize = 48;
/// Maximum number of operations of unknown outcome in one piece.
pub const UNKNOWN_MAX: usize = 4;
/// Maximum number of steps of one search.
pub const STEPS_MAX: u64 = 50_000;

/// Counts of a search over all keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SearchCounts {
    /// Number of operations in pieces that were explained.
    pub explained: u64,
    /// Number of pieces that were explained.
    pub pieces: u64,
    /// Number of pieces that remained undecided.
    pub undecided: u64,
    /// Number of operations that were not searched, because they follow the first
    /// [`OPERATIONS_MAX`] of their piece.
    pub beyond: u64,
}

/// Searches for an order of the operations on each key. `first` returns the value of a key before
/// its first operation, which no client has seen.
///
/// # Errors
/// Describes the first key whose history no order explains.
pub fn check(
    history: &History,
    first: impl Fn(&RegisterKey) -> RegisterText,
) -> Result<SearchCounts, String> {
    let mut tally = SearchCounts::default();
    for (key, operations) in by_key(history) {
        let mut texts = Texts::default();
        let mut holds = texts.held(&first(&key));
        let mut unknown: Vec<SearchStep> = Vec::new();
        for piece in pieces(&operations, &mut texts) {
            let verdict = piece.search(holds, &unknown, &mut tally);
            if verdict == Some(false) {
                let told: Vec<String> = operations.iter().map(|it| format!("  {it:?}")).collect();
                let told = told.join("\n");
                return Err(format!(
                    "no order explains what was seen of {key:?}:\n{told}"
                ));
            }
            unknown.extend(piece.unknown());
            holds = piece.ends_with.unwrap_or(holds);
        }
    }
    Ok(tally)
}

/// Value of a key, if it has one: the number of its text, and whether it drains.
type RegisterValue = Option<(u32, bool)>;

/// An operation on one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegisterOp {
    /// Sets the text and keeps the drain flag.
    Set(u32),
    Clear,
    /// Removes the value. Rejected if there is none.
    Remove,
    /// Sets the drain flag. Rejected if there is no value.
    Drain(bool),
    /// Sets the text and ends draining, because a source has found the engine. Only sources change
    /// such keys here, so a backend that drains is lost.
    Find(u32),
    /// Removes a value that drains. Rejected if there is none.
    Forget,
    Read,
}

/// Result of an operation on one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegisterReturn {
    Done,
    Refused,
    Saw(RegisterValue),
}

/// One operation of a piece, with its result.
#[derive(Debug, Clone, Copy)]
struct SearchStep {
    client: u32,
    called_at_us: u64,
    op: RegisterOp,
    /// Time and result of the response; `None` if unknown.
    returned: Option<(u64, RegisterReturn)>,
}

/// Sequential specification of one key, which counts the steps of the search.
#[derive(Debug, Clone)]
struct RegisterSpec {
    holds: RegisterValue,
    steps: Rc<Cell<u64>>,
}

impl SequentialSpec for RegisterSpec {
    type Op = RegisterOp;
    type Ret = RegisterReturn;

    fn invoke(&mut self, op: &RegisterOp) -> RegisterReturn {
        match (op, self.holds) {
            (RegisterOp::Set(text), held) => {
                self.holds = Some((*text, held.is_some_and(|(_, draining)| draining)));
                RegisterReturn::Done
            }
            (RegisterOp::Clear, _) => {
                self.holds = None;
                RegisterReturn::Done
            }
            (RegisterOp::Find(text), _) => {
                self.holds = Some((*text, false));
                RegisterReturn::Done
            }
            (RegisterOp::Forget, Some((_, true))) => {
                self.holds = None;
                RegisterReturn::Done
            }
            (RegisterOp::Forget, Some((_, false)) | None) => RegisterReturn::Refused,
            (RegisterOp::Remove | RegisterOp::Drain(_), None) => RegisterReturn::Refused,
            (RegisterOp::Remove, Some(_)) => {
                self.holds = None;
                RegisterReturn::Done
            }
            (RegisterOp::Drain(draining), Some((text, _))) => {
                self.holds = Some((text, *draining));
                RegisterReturn::Done
            }
            (RegisterOp::Read, holds) => RegisterReturn::Saw(holds),
        }
    }

    fn is_valid_step(&mut self, op: &RegisterOp, answer: &RegisterReturn) -> bool {
        self.steps.set(self.steps.get() + 1);
        self.steps.get() <= STEPS_MAX && self.invoke(op) == *answer
    }
}

/// Numbering of texts, so that values are small.
#[derive(Debug, Default)]
struct Texts(BTreeMap<String, u32>);

impl Texts {
    fn number(&mut self, text: &str) -> u32 {
        let next = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        *self.0.entry(text.to_owned()).or_insert(next)
    }

    /// Returns the value that a read returned. The text of a backend includes its drain flag.
    fn held(&mut self, value: &RegisterText) -> RegisterValue {
        let value = value.as_deref()?;
        for draining in [false, true] {
            if let Some(spec) = value.strip_prefix(&format!("draining: {draining}, ")) {
                return Some((self.number(spec), draining));
            }
        }
        Some((self.number(value), false))
    }

    /// Returns the operation that an action performs on its key.
    fn op(&mut self, action: &Action) -> RegisterOp {
        let Action::Write(command) = action else {
            return RegisterOp::Read;
        };
        match command {
            Command::PutBackend(spec) => RegisterOp::Set(self.number(&format!("{spec:?}"))),
            Command::Discover(discovery) => match &discovery.change {
                DiscoveryChange::Found(spec) => RegisterOp::Find(self.number(&format!("{spec:?}"))),
                DiscoveryChange::Lost { .. } => RegisterOp::Drain(true),
                DiscoveryChange::Forgotten { .. } => RegisterOp::Forget,
            },
            Command::DeleteBackend { .. } => RegisterOp::Remove,
            Command::SetDraining { draining, .. } => RegisterOp::Drain(*draining),
            Command::PutPolicy(policy) => RegisterOp::Set(self.number(&format!("{policy:?}"))),
            Command::PutRouting(settings) => RegisterOp::Set(self.number(&format!("{settings:?}"))),
            Command::PutAdmission(settings) => {
                RegisterOp::Set(self.number(&format!("{settings:?}")))
            }
            Command::PutUserDefaults(defaults) => {
                RegisterOp::Set(self.number(&format!("{defaults:?}")))
            }
            Command::ConfigureUser { settings, .. } => match user(settings) {
                Some(text) => RegisterOp::Set(self.number(&text)),
                None => RegisterOp::Clear,
            },
            Command::DeleteUser { .. } => RegisterOp::Clear,
            // The command writes no key, and none is queried here.
            _ => RegisterOp::Read,
        }
    }
}

/// A piece of a key's history, which begins with a known value.
#[derive(Debug, Default)]
struct KeyHistoryPart {
    steps: Vec<SearchStep>,
    /// Value at the end of the piece, if it was read.
    ends_with: Option<RegisterValue>,
}

impl KeyHistoryPart {
    /// Returns the operations of unknown outcome, which carry over into later pieces.
    fn unknown(&self) -> impl Iterator<Item = SearchStep> {
        self.steps
            .iter()
            .filter(|it| it.returned.is_none())
            .copied()
    }

    /// Returns whether some order explains the piece, which begins with the value `holds`; `None`
    /// if undecided.
    fn search(
        &self,
        holds: RegisterValue,
        before: &[SearchStep],
        tally: &mut SearchCounts,
    ) -> Option<bool> {
        let mut steps: Vec<SearchStep> = before.iter().chain(&self.steps).copied().collect();
        // A set of unknown outcome whose value was never read may be omitted: it explains nothing.
        let seen: BTreeSet<u32> = steps.iter().filter_map(SearchStep::saw).collect();
        let keeps_answers = |op: RegisterOp| {
            matches!(
                op,
                RegisterOp::Remove | RegisterOp::Drain(_) | RegisterOp::Forget
            )
        };
        let has_answers = steps.iter().any(|it| keeps_answers(it.op));
        steps.retain(|it| match (it.op, it.returned) {
            (RegisterOp::Set(text) | RegisterOp::Find(text), None) => {
                has_answers || seen.contains(&text)
            }
            (RegisterOp::Read, None) => false,
            _ => true,
        });
        if steps.iter().filter(|it| it.returned.is_none()).count() > UNKNOWN_MAX {
            tally.undecided += 1;
            return None;
        }
        steps.sort_by_key(|it| it.called_at_us);
        tally.beyond += steps.len().saturating_sub(OPERATIONS_MAX) as u64;
        steps.truncate(OPERATIONS_MAX);
        let counted = Rc::new(Cell::new(0));
        let register = RegisterSpec {
            holds,
            steps: Rc::clone(&counted),
        };
        let is_explained = played(register, &steps).is_consistent();
        if is_explained {
            tally.explained += steps.len() as u64;
            tally.pieces += 1;
        } else if counted.get() > STEPS_MAX {
            tally.undecided += 1;
            return None;
        }
        Some(is_explained)
    }
}

impl SearchStep {
    fn saw(&self) -> Option<u32> {
        match self.returned {
            Some((_, RegisterReturn::Saw(Some((text, _))))) => Some(text),
            _ => None,
        }
    }
}

/// Reports all calls and returns to a new tester in chronological order.
fn played(
    register: RegisterSpec,
    steps: &[SearchStep],
) -> LinearizabilityTester<(u32, u32), RegisterSpec> {
    let until_us = steps.last().map_or(0, |it| it.called_at_us);
    let mut events: Vec<(u64, bool, usize)> = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        // At the same moment calls precede returns, so that operations overlap if they can.
        events.push((step.called_at_us, false, at));
        if let Some((returned_at_us, _)) = step.returned
            && returned_at_us <= until_us
        {
            events.push((returned_at_us, true, at));
        }
    }
    // No call follows the last one, so the order of later returns does not matter.
    let late = |step: &SearchStep| step.returned.is_some_and(|(at_us, _)| at_us > until_us);
    let late = steps.iter().enumerate().filter(|(_, step)| late(step));
    events.extend(late.map(|(at, _)| (u64::MAX, true, at)));
    events.sort_unstable();
    let mut tester = LinearizabilityTester::new(register);
    let mut threads: BTreeMap<u32, u32> = BTreeMap::new();
    let mut names: BTreeMap<usize, (u32, u32)> = BTreeMap::new();
    for (_, is_return, at) in events {
        let step = &steps[at];
        let told = match step.returned {
            Some((_, answer)) if is_return => tester.on_return(names[&at], answer),
            _ => {
                // After an unknown outcome a client continues as another thread.
                let thread = threads.entry(step.client).or_default();
                let name = (step.client, *thread);
                *thread += u32::from(step.returned.is_none());
                names.insert(at, name);
                tester.on_invoke(name, step.op)
            }
        };
        told.expect("a client has one operation under way");
    }
    tester
}

/// Returns the operations on each key except API keys, in the order of the calls.
fn by_key(history: &History) -> BTreeMap<RegisterKey, Vec<&Operation>> {
    let mut keys: BTreeMap<RegisterKey, Vec<&Operation>> = BTreeMap::new();
    for operation in &history.operations {
        let its = match &operation.action {
            Action::Read(key) => vec![key.clone()],
            Action::Write(command) => RegisterKey::all_of(command),
        };
        // API keys are left to the search in the log's order: after its id is revoked, a key
        // differs from one that was never created.
        let its = its.into_iter();
        for key in its.filter(|key| !matches!(key, RegisterKey::ApiKey(_))) {
            keys.entry(key).or_default().push(operation);
        }
    }
    for operations in keys.values_mut() {
        operations.sort_by_key(|it| it.called_at_us);
    }
    keys
}

/// Cuts a key's history after each read that overlaps no operation of known outcome.
fn pieces(operations: &[&Operation], texts: &mut Texts) -> Vec<KeyHistoryPart> {
    let mut pieces = vec![KeyHistoryPart::default()];
    let mut latest_us = 0;
    for (at, operation) in operations.iter().enumerate() {
        let op = texts.op(&operation.action);
        let Some(answer) = answer(&operation.outcome, texts) else {
            continue;
        };
        let returned = operation.returned_at_us.zip(answer);
        let piece = pieces.last_mut().expect("there is a first piece");
        piece.steps.push(SearchStep {
            client: operation.client,
            called_at_us: operation.called_at_us,
            op,
            returned,
        });
        let is_after_all = latest_us < operation.called_at_us;
        let Some((returned_at_us, answer)) = returned else {
            continue;
        };
        latest_us = latest_us.max(returned_at_us);
        let next = operations.get(at + 1);
        let is_before_all = next.is_none_or(|next| next.called_at_us > returned_at_us);
        if let (RegisterReturn::Saw(held), true, true) = (answer, is_after_all, is_before_all) {
            piece.ends_with = Some(held);
            pieces.push(KeyHistoryPart::default());
        }
    }
    pieces
}

/// Returns the result that a client received. The inner `None` means that it is unknown, the outer
/// `None` that the operation did not happen.
#[allow(clippy::option_option)] // Not happened, happened with an unknown answer, answered.
fn answer(outcome: &OperationResult, texts: &mut Texts) -> Option<Option<RegisterReturn>> {
    Some(match outcome {
        OperationResult::Refused => return None,
        OperationResult::Unknown => None,
        OperationResult::Read { value, .. } => Some(RegisterReturn::Saw(texts.held(value))),
        OperationResult::Written(committed) => match plain(&committed.reply) {
            Reply::Rejected(Rejection::UnknownBackend { .. } | Rejection::NotOfSource { .. }) => {
                Some(RegisterReturn::Refused)
            }
            Reply::Rejected(_) => return None,
            Reply::Applied | Reply::Batch(_) | Reply::Repeated(_) => Some(RegisterReturn::Done),
        },
    })
}

/// Returns a reply without the mark of a repeat.
pub(crate) fn plain(reply: &Reply) -> &Reply {
    match reply {
        Reply::Repeated(first) => first,
        first => first,
    }
}
