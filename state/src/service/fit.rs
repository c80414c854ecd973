//! Recursive least squares with forgetting: learns the unit costs of a few known amounts from their
//! total cost.
//!
//! The normal equations of all observations are kept, with older ones fading. Each new observation
//! refines their solution by some sweeps of projected Gauss-Seidel. This takes additions, products
//! and one division per coefficient: integers throughout, bounded coefficients, and the same result
//! on every replica. The prior keeps a small weight, so that the solution is unique even if all
//! observations are alike. Amounts that always occur together then share their cost in proportion,
//! and the first observation is explained at once.
//!
//! Costs that are not among the amounts still correlate with some of them: requests cost time by
//! themselves, and many requests bring many tokens. This does not average out. The weight of the
//! prior may therefore grow with that of the observations (`Regressor::kept_in`): an amount that
//! hardly varies reveals little about its own price, however often it is observed.

use bincode::{Decode, Encode};

/// Maximum total weight of all observations; older ones fade as newer ones arrive.
const WEIGHT_MAX: i64 = 1024;
/// Maximum weight of one observation. The mean over many events reveals little more than the mean
/// over some.
const OBSERVATION_WEIGHT_MAX: i64 = 64;
/// Number of sweeps per observation. Each brings the coefficients closer to the solution.
const SWEEPS: usize = 24;
/// Maximum ratio of an observation to the expected value, once there is an expectation.
const SURPRISE_FACTOR: i64 = 4;
/// Total weight of the observations from which there is an expectation.
const SURPRISE_WEIGHT: i64 = 128;

/// Description of one of the amounts that make up the total cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Regressor {
    /// Maximum amount in an observation that is learned from.
    pub(super) amount_max: i64,
    /// Typical amount: the scale on which an error of the coefficient is weighted.
    pub(super) typical: i64,
    /// Prior of the coefficient, in thousandths.
    pub(super) prior_milli: i64,
    /// Minimum and maximum of the coefficient, in thousandths.
    pub(super) bounds_milli: (i64, i64),
    /// Total weight of observations per unit of the prior's weight.
    pub(super) kept_in: i64,
}

/// Minimum weight of the prior, in observations of a typical amount.
const PRIOR_WEIGHT: i64 = 2;

/// Estimator of the unit costs of `N` amounts, in thousandths of the observed unit.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub(super) struct RecursiveLeastSquares<const N: usize> {
    weight: i64,
    /// Weighted sums of the products of each pair of amounts.
    squares: [[i64; N]; N],
    /// Weighted sums of the products of each amount and the observed total.
    products: [i64; N],
    /// Coefficients in thousandths; meaningless while `weight` is 0.
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
    /// Learns that `amounts` together cost `observed` on average over `events`. Ignores
    /// observations with an amount out of bounds: capping the amount would make it look expensive.
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

    /// Returns the total weight of all observations, faded.
    pub(super) fn weight(&self) -> u32 {
        u32::try_from(self.weight).unwrap_or(0)
    }

    /// Returns the learned cost of one unit of the `i`th amount, in thousandths.
    pub(super) fn coefficient_milli(&self, i: usize) -> i64 {
        self.coefficients_milli[i]
    }

    /// Returns `observed`, capped at a credible value so that a single outlier cannot undo a
    /// thousand observations. A lasting change is still followed, in several steps.
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
        // Never above the original, because `kept` is below `whole`.
        let faded = |sum: i64| (i128::from(sum) * kept / whole) as i64;
        self.squares = self.squares.map(|row| row.map(faded));
        self.products = self.products.map(faded);
        self.weight = faded(self.weight);
    }

    /// Sets each coefficient in turn to its optimum given the others, within its bounds.
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
            // Within bounds that fit 64 bits.
            self.coefficients_milli[i] = best as i64;
        }
    }
}

/// Adds `weight * a * b` to `sum`, saturating.
fn add(sum: &mut i64, weight: i64, a: i64, b: i64) {
    *sum = sum.saturating_add(weight.saturating_mul(a).saturating_mul(b));
}
