//! Generated workloads: prompts of a common prefix, a group's prefix, and a unique end.
//!
//! One generator with parameters makes all of them: `shared-prefix` has groups, `one-hot` sends
//! most requests to one of them, `templated` puts one beginning before all groups, `burst` sends
//! many times faster for a while, `volatile` has a field early on that differs between groups.

use std::sync::Arc;

use super::{LengthRange, SimArrival, SimPrompt, SimUser, SimWorkload};
use crate::engine::text::TOKEN_BYTES;
use crate::replay::text::passage;
use crate::rng::Rng;
use crate::simulate::events::Micros;
use crate::simulate::plan::BLOCK_TOKENS;

/// Sizes of a generated workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    /// Requests per second on average.
    pub rate: f64,
    /// Until when they come.
    pub duration: Micros,
    /// Requests at most.
    pub requests: u64,
    /// Tokens that all prompts begin with.
    pub common_tokens: u32,
    /// Groups with a beginning of their own.
    pub groups: u32,
    /// Tokens of a group's beginning.
    pub group_tokens: u32,
    /// Tokens that all prompts have behind that.
    pub shared_after_tokens: u32,
    /// Tokens of a request's own, and output tokens.
    pub lengths: LengthRange,
    /// Share of the requests that go to the first group, in thousandths; 0: an equal share.
    pub hot_permille: u32,
    /// Faster for a while, again and again.
    pub burst: Option<Burst>,
    /// Users, who send in turn.
    pub users: u32,
}

/// A rate that changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Every so often.
    pub every: Micros,
    /// For so long.
    pub length: Micros,
    /// So many times the rate of the rest.
    pub factor: f64,
}

impl Mix {
    /// Long group prefixes: what routing by prefix is for.
    #[must_use]
    pub fn shared_prefix() -> Self {
        Self {
            rate: 20.0,
            duration: 60_000_000,
            requests: u64::MAX,
            common_tokens: 0,
            groups: 32,
            group_tokens: 2048,
            shared_after_tokens: 0,
            lengths: LengthRange {
                input: (64, 192),
                output: (16, 64),
            },
            hot_permille: 0,
            burst: None,
            users: 8,
        }
    }

    /// Most requests share one prefix: following it overloads its holder.
    #[must_use]
    pub fn one_hot() -> Self {
        Self {
            hot_permille: 800,
            ..Self::shared_prefix()
        }
    }

    /// All prompts begin alike: any match is worth little.
    #[must_use]
    pub fn templated() -> Self {
        Self {
            common_tokens: 256,
            groups: 64,
            group_tokens: 1024,
            ..Self::shared_prefix()
        }
    }

    /// One block that differs between the groups stands early in prompts that are alike before and
    /// behind it: engines share nothing behind it, however alike it looks.
    #[must_use]
    pub fn volatile() -> Self {
        Self {
            common_tokens: BLOCK_TOKENS,
            groups: 64,
            group_tokens: BLOCK_TOKENS,
            shared_after_tokens: 1024,
            ..Self::shared_prefix()
        }
    }

    /// Five seconds of every twenty at six times the rate of the others.
    #[must_use]
    pub fn burst() -> Self {
        Self {
            burst: Some(Burst {
                every: 20_000_000,
                length: 5_000_000,
                factor: 6.0,
            }),
            ..Self::shared_prefix()
        }
    }

    /// Draws the requests.
    #[must_use]
    pub fn generate(&self, seed: u64) -> SimWorkload {
        let mut rng = Rng::new(seed, 1);
        let text_seed = rng.next_u64();
        let beginning = |group: u64| {
            let common = passage(text_seed, 0, self.common_tokens as usize * TOKEN_BYTES);
            let own = passage(
                text_seed,
                1 + group,
                self.group_tokens as usize * TOKEN_BYTES,
            );
            let after = self.shared_after_tokens as usize * TOKEN_BYTES;
            common + &own + &passage(!text_seed, 0, after)
        };
        let groups: Vec<String> = (0..u64::from(self.groups.max(1))).map(beginning).collect();
        let users = (1..=self.users.max(1)).map(|number| SimUser::named(&format!("user-{number}")));
        let mut workload = SimWorkload {
            users: users.collect(),
            ..SimWorkload::default()
        };
        let mut at = 0;
        while (workload.arrivals.len() as u64) < self.requests {
            at += rng.gap_us(self.rate_at(at));
            if at >= self.duration {
                break;
            }
            let group = self.group(&mut rng);
            let own_tokens = LengthRange::draw(self.lengths.input, &mut rng) as usize;
            let own = passage(rng.next_u64(), 0, own_tokens * TOKEN_BYTES);
            let text = [groups[group].as_bytes(), own.as_bytes()].concat();
            workload.arrivals.push(SimArrival {
                at,
                user: group % workload.users.len(),
                prompt: Arc::new(SimPrompt::new(&text)),
                output_tokens: LengthRange::draw(self.lengths.output, &mut rng),
                replica: None,
            });
        }
        workload
    }

    fn group(&self, rng: &mut Rng) -> usize {
        let is_hot = rng.below(1000) < u64::from(self.hot_permille);
        let drawn = rng.below(u64::from(self.groups.max(1)));
        if is_hot {
            0
        } else {
            usize::try_from(drawn).expect("groups are counted in 32 bits")
        }
    }

    /// The rate at a time; over a whole period it has the mean that was asked for.
    fn rate_at(&self, at: Micros) -> f64 {
        let Some(burst) = self.burst else {
            return self.rate;
        };
        let share = burst.length as f64 / burst.every as f64;
        let quiet = self.rate / (1.0 + share * (burst.factor - 1.0));
        if at % burst.every < burst.length {
            quiet * burst.factor
        } else {
            quiet
        }
    }
}
