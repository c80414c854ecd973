//! Hot spots: how load spreads over a fleet in many requests. Each engine is modelled as policies
//! see it: requests run for a while, those beyond its slots wait, they fill the cache, and a prompt
//! is held where it ran.

use std::collections::VecDeque;

use super::*;

/// Number of requests that an engine runs at a time.
const SLOTS: u32 = 16;
/// Number of requests in flight in the whole fleet.
const UNDER_WAY: usize = 96;
const BACKENDS: usize = 8;
const REQUESTS: u64 = 8_000;
/// Number of different prompts.
const PROMPTS: usize = 50;

struct Fleet {
    candidates: Vec<Candidate>,
    /// Whether each backend holds each prompt.
    held: [[bool; PROMPTS]; BACKENDS],
    under_way: VecDeque<(usize, u64)>,
    chosen: [u32; BACKENDS],
}

impl Fleet {
    fn new() -> Self {
        let candidate = |slot| Candidate {
            slot: Slot(slot),
            free_blocks: u32::MAX,
            ..Candidate::default()
        };
        Self {
            candidates: (0..BACKENDS as u16).map(candidate).collect(),
            held: [[false; PROMPTS]; BACKENDS],
            under_way: VecDeque::new(),
            chosen: [0; BACKENDS],
        }
    }

    /// Sends one request with the given prompt, and ends the oldest if there are too many.
    fn send(&mut self, policy: &PolicyConfig, number: u64, prompt: usize) {
        let mut request = PolicyRequest {
            jitter: rank::mix(number),
            turn: number,
            session: Some(rank::mix(number)),
            prefix_key: rank::mix(prompt as u64),
            ..REQUEST
        };
        request.user.own_milli = (number % 40) * 1_000_000;
        for (candidate, held) in self.candidates.iter_mut().zip(&self.held) {
            candidate.matched = if held[prompt] { 90 } else { 0 };
            candidate.waiting = candidate.running.saturating_sub(SLOTS);
            candidate.kv_usage_permille = (candidate.running * 1000 / SLOTS).min(1000);
        }
        let choice = choose(policy, &request, &self.candidates).unwrap();
        let at = usize::from(choice.slot.0);
        let prefill = request.uncached_tokens(choice.matched);
        self.chosen[at] += 1;
        self.held[at][prompt] = true;
        self.candidates[at].running += 1;
        self.candidates[at].pending += 1;
        self.candidates[at].pending_prefill_tokens += prefill;
        self.under_way.push_back((at, prefill));
        if self.under_way.len() > UNDER_WAY {
            let (at, prefill) = self.under_way.pop_front().unwrap();
            self.candidates[at].running -= 1;
            self.candidates[at].pending -= 1;
            self.candidates[at].pending_prefill_tokens -= prefill;
        }
    }

    /// Returns the share of the requests that the busiest backend got, in percent.
    fn busiest_percent(&self) -> u32 {
        let most = self.chosen.iter().max().unwrap();
        most * 100 / REQUESTS as u32
    }
}

#[test]
fn a_dominant_prefix_spreads_over_backends() {
    for policy in PolicyConfig::defaults() {
        let mut fleet = Fleet::new();
        for number in 0..REQUESTS {
            let prompt = if number % 10 == 0 {
                1 + (rank::mix(number) as usize) % (PROMPTS - 1)
            } else {
                0
            };
            fleet.send(&policy, number, prompt);
        }
        // An equal share is 12.5 percent.
        let name = policy.name();
        assert!(fleet.busiest_percent() <= 30, "{name}: {:?}", fleet.chosen);
        assert!(
            fleet.chosen.iter().all(|it| *it > 0),
            "{name}: {:?}",
            fleet.chosen
        );
    }
}

#[test]
fn misses_spread_over_backends() {
    for policy in PolicyConfig::defaults() {
        let mut shares = [0_u32; BACKENDS];
        for number in 0..4_000_u64 {
            // Simultaneous arrivals at an idle fleet that holds nothing.
            let fleet = Fleet::new();
            let mut request = PolicyRequest {
                jitter: rank::mix(number),
                turn: number,
                session: Some(rank::mix(number)),
                prefix_key: rank::mix(number),
                ..REQUEST
            };
            request.user.own_milli = (number % 40) * 1_000_000;
            let choice = choose(&policy, &request, &fleet.candidates).unwrap();
            shares[usize::from(choice.slot.0)] += 1;
        }
        let name = policy.name();
        // 500 is an equal share. `vtc-basic` places users by their usage, and the heaviest users
        // share the last position.
        let fair = if name == "vtc-basic" {
            250..1100
        } else {
            350..650
        };
        assert!(
            shares.iter().all(|it| fair.contains(it)),
            "{name}: {shares:?}"
        );
    }
}
