//! Least squares that never ends: what each of a few known amounts costs, learnt from their sums.
//!
//! The normal equations of all observations are kept, older ones faded, and their solution is
//! refined by some sweeps of projected Gauss-Seidel at each new one. That needs additions,
//! products and one division per coefficient: integers throughout, a bound on every coefficient,
//! and the same result on every replica. A little weight stays on where the coefficients began, so
//! that the equations have one solution however alike the observations are: amounts that always
//! come together share what they cost in proportion, and a first observation is explained at once.
//!
//! What is not among the amounts still comes with some of them: requests cost time by themselves,
//! and many bring many tokens. That does not average out, so the weight on the beginning may grow
//! with that of the observations (`Regressor::kept_in`): an amount that hardly varies says little about
//! its own price, however often it is seen.

use bincode::{Decode, Encode};

/// Weight of all observations together; older ones fade as newer ones come.
const WEIGHT_MAX: i64 = 1024;
/// Weight of one observation at most: the mean over many events says little more than over some.
const OBSERVATION_WEIGHT_MAX: i64 = 64;
/// Sweeps per observation. Each brings the coefficients nearer to the solution.
const SWEEPS: usize = 24;
/// An observation counts as at most so many times what was expected of it, once there is reason to
/// expect anything.
const SURPRISE_FACTOR: i64 = 4;
/// Weight from which on there is.
const SURPRISE_WEIGHT: i64 = 128;

/// One of the amounts that a sum is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Regressor {
    /// Largest amount that is learnt from.
    pub(super) amount_max: i64,
    /// An amount as it typically is: the unit of what an error in the coefficient weighs.
    pub(super) typical: i64,
    /// Where the coefficient begins, in thousandths.
    pub(super) prior_milli: i64,
    /// Least and greatest coefficient, in thousandths.
    pub(super) bounds_milli: (i64, i64),
    /// The beginning keeps the weight of one in so many observations.
    pub(super) kept_in: i64,
}

/// Least weight of the beginning, in observations of a typical amount.
const PRIOR_WEIGHT: i64 = 2;

/// What `N` amounts cost, in thousandths of the observed unit each.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub(super) struct RecursiveLeastSquares<const N: usize> {
    weight: i64,
    /// Sums of the products of any two amounts.
    squares: [[i64; N]; N],
    /// Sums of the products of each amount and what was observed.
    products: [i64; N],
    /// Thousandths; empty of meaning while `weight` is 0.
    coefficients_milli: [i64; N],
}

impl<const N: usize> Default for RecursiveLeastSquares<N> {
    fn default() -> Self {
        Self {
            weight: 0,
            squares: [[0; N]; N],
            products: [0; N],
            coefficients_milli: [0; N],
        }
    }
}

impl<const N: usize> RecursiveLeastSquares<N> {
    /// Learns that `amounts` together cost `observed`, on average over `events`. Amounts beyond
    /// their bounds teach nothing: taken as less than they are, they would seem dear.
    pub(super) fn observe(
        &mut self,
        terms: &[Regressor; N],
        amounts: [i64; N],
        observed: i64,
        events: u64,
    ) {
        let weight = i64::try_from(events)
            .unwrap_or(i64::MAX)
            .min(OBSERVATION_WEIGHT_MAX);
        let is_within = |(amount, term): (&i64, &Regressor)| (0..=term.amount_max).contains(amount);
        if weight == 0 || !amounts.iter().zip(terms).all(is_within) {
            return;
        }
        if self.weight == 0 {
            self.coefficients_milli = std::array::from_fn(|i| terms[i].prior_milli);
        }
        let observed = self.unsurprising(&amounts, observed.max(0));
        self.fade((self.weight + weight - WEIGHT_MAX).max(0));
        self.weight += weight;
        for i in 0..N {
            for j in 0..N {
                add(&mut self.squares[i][j], weight, amounts[i], amounts[j]);
            }
            add(&mut self.products[i], weight, amounts[i], observed);
        }
        for _ in 0..SWEEPS {
            self.sweep(terms);
        }
    }

    /// Observations behind it, faded.
    pub(super) fn weight(&self) -> u32 {
        u32::try_from(self.weight).unwrap_or(0)
    }

    /// What one of the `i`th amount costs, thousandths.
    pub(super) fn coefficient_milli(&self, i: usize) -> i64 {
        self.coefficients_milli[i]
    }

    /// One wild observation must not undo a thousand: it is taken as the most that is credible. A
    /// lasting change is still followed, by as many steps.
    fn unsurprising(&self, amounts: &[i64; N], observed: i64) -> i64 {
        if self.weight < SURPRISE_WEIGHT {
            return observed;
        }
        let parts = amounts.iter().zip(&self.coefficients_milli);
        let expected_milli: i128 = parts.map(|(x, c)| i128::from(*x) * i128::from(*c)).sum();
        let expected = i64::try_from(expected_milli / 1000).unwrap_or(i64::MAX);
        observed.min(expected.max(1).saturating_mul(SURPRISE_FACTOR))
    }

    fn fade(&mut self, by: i64) {
        if by == 0 || self.weight <= 0 {
            return;
        }
        let kept = i128::from((self.weight - by).max(0));
        let whole = i128::from(self.weight);
        // Never above what it was, as `kept` is below `whole`.
        let faded = |sum: i64| (i128::from(sum) * kept / whole) as i64;
        self.squares = self.squares.map(|row| row.map(faded));
        self.products = self.products.map(faded);
        self.weight = faded(self.weight);
    }

    /// Sets one coefficient after the other to the best one given the others, within its bounds.
    fn sweep(&mut self, terms: &[Regressor; N]) {
        for (i, term) in terms.iter().enumerate() {
            let prior_weight = (self.weight / term.kept_in).max(PRIOR_WEIGHT);
            let prior = i128::from(prior_weight) * i128::from(term.typical).pow(2);
            let others: i128 = (0..N)
                .filter(|j| *j != i)
                .map(|j| i128::from(self.squares[i][j]) * i128::from(self.coefficients_milli[j]))
                .sum();
            let wanted =
                i128::from(self.products[i]) * 1000 - others + prior * i128::from(term.prior_milli);
            let scale = (i128::from(self.squares[i][i]) + prior).max(1);
            let (least, most) = term.bounds_milli;
            let best = (wanted / scale).clamp(least.into(), most.into());
            // Within bounds that are 64 bits long.
            self.coefficients_milli[i] = best as i64;
        }
    }
}

/// Adds `weight * a * b`, at most as much as there is room for.
fn add(sum: &mut i64, weight: i64, a: i64, b: i64) {
    *sum = sum.saturating_add(weight.saturating_mul(a).saturating_mul(b));
}
