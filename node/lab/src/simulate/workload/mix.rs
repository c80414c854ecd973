//! Generated workloads: prompts with a common prefix, a group prefix, and a unique end.
//!
//! One parametrised generator makes all of them: `shared-prefix` has groups, `one-hot` sends most
//! requests to one group, `templated` puts a common prefix before all groups, `burst` temporarily
//! multiplies the rate, `volatile` has an early field that differs between groups, `day` follows a day.

use std::sync::Arc;

use super::day::DayCurve;
use super::{LengthRange, SimArrival, SimPrompt, SimUser, SimWorkload};
use crate::engine::text::TOKEN_BYTES;
use crate::replay::text::passage;
use crate::rng::Rng;
use crate::simulate::events::Micros;
use crate::simulate::plan::BLOCK_TOKENS;

/// Parameters of the generator of workloads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    /// Mean rate in requests per second.
    pub rate: f64,
    /// Time until which requests arrive.
    pub duration: Micros,
    /// Maximum number of generated requests.
    pub requests: u64,
    /// Length of the prefix common to all prompts, in tokens.
    pub common_tokens: u32,
    /// Number of groups, each with its own prefix.
    pub groups: u32,
    /// Length of a group's prefix, in tokens.
    pub group_tokens: u32,
    /// Length of the text common to all prompts after the group's prefix, in tokens.
    pub shared_after_tokens: u32,
    /// Ranges of the length of a request's own text and of its number of output tokens.
    pub lengths: LengthRange,
    /// Share of requests that go to the first group, in thousandths, in addition to its equal share
    /// of the rest.
    pub hot_permille: u32,
    /// How the rate changes with time.
    pub rhythm: Rhythm,
    /// Number of users, who send requests in turn.
    pub users: u32,
}

/// How a rate changes with time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rhythm {
    /// Not at all.
    Even,
    /// Periodic bursts.
    Bursts(Burst),
    /// The duration is a day.
    Day,
}

/// Periodic bursts of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Time from the start of one burst to the next, in microseconds.
    pub every: Micros,
    /// Duration of a burst, in microseconds.
    pub length: Micros,
    /// Rate during a burst, relative to the rate between bursts.
    pub factor: f64,
}

impl Mix {
    /// Returns a mix with long group prefixes, the main use of prefix routing.
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
            rhythm: Rhythm::Even,
            users: 8,
        }
    }

    /// Returns a mix in which most requests share one prefix. A router that only follows the prefix
    /// overloads its holder.
    #[must_use]
    pub fn one_hot() -> Self {
        Self {
            hot_permille: 800,
            ..Self::shared_prefix()
        }
    }

    /// Returns a mix with a common prefix in all prompts, so that a match alone is worth little.
    #[must_use]
    pub fn templated() -> Self {
        Self {
            common_tokens: 256,
            groups: 64,
            group_tokens: 1024,
            ..Self::shared_prefix()
        }
    }

    /// Returns a mix in which prompts are equal except for one early block per group. Blocks after
    /// it have equal content, but cannot be shared between groups.
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

    /// Returns a mix with bursts: five seconds in every twenty, at six times the rate of the rest.
    #[must_use]
    pub fn burst() -> Self {
        Self {
            rhythm: Rhythm::Bursts(Burst {
                every: 20_000_000,
                length: 5_000_000,
                factor: 6.0,
            }),
            ..Self::shared_prefix()
        }
    }

    /// Returns a day of chats at an eighth of the lengths of [`Mix::shared_prefix`], so that a day of
    /// requests can be simulated.
    #[must_use]
    pub fn day() -> Self {
        Self {
            rate: 2.0,
            duration: 86_400_000_000,
            group_tokens: 256,
            lengths: LengthRange {
                input: (8, 24),
                output: (16, 64),
            },
            rhythm: Rhythm::Day,
            ..Self::shared_prefix()
        }
    }

    /// Generates the requests of the mix. Equal seeds give equal requests.
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
        let mut day = DayCurve::new(self.rate, self.duration, seed);
        let mut at = 0;
        while (workload.arrivals.len() as u64) < self.requests {
            at = match self.rhythm {
                Rhythm::Even => at + rng.gap_us(self.rate),
                Rhythm::Bursts(burst) => at + rng.gap_us(burst.rate_at(at, self.rate)),
                Rhythm::Day => day.next_after(at),
            };
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
                session: None,
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
}

impl Burst {
    /// Returns the rate at the time `at`. Its mean over a whole period is `mean`.
    fn rate_at(&self, at: Micros, mean: f64) -> f64 {
        let share = self.length as f64 / self.every as f64;
        let quiet = mean / (1.0 + share * (self.factor - 1.0));
        if at % self.every < self.length {
            quiet * self.factor
        } else {
            quiet
        }
    }
}
