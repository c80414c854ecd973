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
//!
//! Whether the coefficients of two estimators differ, the prior cannot tell: it moves those of
//! engines whose load varies little more than those of others. A coefficient therefore also has a
//! range, in which it lies according to the observations alone: the solution without the prior, and
//! three standard errors on each side, from the scatter of the observations around the solution. Its
//! least is no more than the amount would cost if it cost everything.

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

/// Unit of the sums and of the number of observations. Fading rounds down a thousand times; without
/// digits behind the point, amounts that do not vary would seem to.
const ONE: i128 = 1 << 20;
/// Minimum number of observations whose scatter is trusted.
const SCATTER_OBSERVATIONS_MIN: i128 = 16;
/// Divisor of the priors' weights in a solution by the observations alone. It is finite so that there
/// is one even if an amount never occurs.
const PRIOR_FADED: i128 = 4096;
/// Minimum scatter of observations around the solution, as a share of their squares in millionths:
/// one per cent of each, because rounding alone may hide more.
const SCATTER_MIN_MILLIONTHS: i128 = 100;
/// Number of standard errors on each side of a range.
const STANDARD_ERRORS: i128 = 3;

/// Minimum weight of the prior, in observations of a typical amount.
const PRIOR_WEIGHT: i64 = 2;

/// Estimator of the unit costs of `N` amounts, in thousandths of the observed unit.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub(super) struct RecursiveLeastSquares<const N: usize> {
    weight: i64,
    /// Weighted sums of the products of each pair of amounts, in units of 1 / [`ONE`], as all sums.
    squares: [[i128; N]; N],
    /// Weighted sums of the products of each amount and the observed total.
    products: [i128; N],
    /// Weighted sum of the squares of the observed totals.
    squared_total: i128,
    /// Number of observations, faded.
    observations: i128,
    /// Coefficients in thousandths; meaningless while `weight` is 0.
    coefficients_milli: [i64; N],
    /// Least and most that each coefficient can be according to the observations alone.
    ranges_milli: [Option<(i64, i64)>; N],
}

impl<const N: usize> Default for RecursiveLeastSquares<N> {
    fn default() -> Self {
        Self {
            weight: 0,
            squares: [[0; N]; N],
            products: [0; N],
            squared_total: 0,
            observations: 0,
            coefficients_milli: [0; N],
            ranges_milli: [None; N],
        }
    }
}

impl<const N: usize> RecursiveLeastSquares<N> {
    /// Learns that `amounts` together cost `observed` on average over `events`, and updates the ranges.
    pub(super) fn observe(
        &mut self,
        terms: &[Regressor; N],
        amounts: [i64; N],
        observed: i64,
        events: u64,
    ) {
        if self.learn(terms, amounts, observed, events) {
            let scatter = self.scatter_milli2();
            self.ranges_milli = std::array::from_fn(|i| self.range(terms, i, scatter));
        }
    }

    /// Learns like [`Self::observe`], without ranges: their cost grows with the factorial of `N`.
    /// Ignores observations with an amount out of bounds, because capping the amount would make it
    /// look expensive. Returns whether it learned.
    pub(super) fn learn(
        &mut self,
        terms: &[Regressor; N],
        amounts: [i64; N],
        observed: i64,
        events: u64,
    ) -> bool {
        let weight = i64::try_from(events)
            .unwrap_or(i64::MAX)
            .min(OBSERVATION_WEIGHT_MAX);
        let is_within = |(amount, term): (&i64, &Regressor)| (0..=term.amount_max).contains(amount);
        if weight == 0 || !amounts.iter().zip(terms).all(is_within) {
            return false;
        }
        if self.weight == 0 {
            self.coefficients_milli = std::array::from_fn(|i| terms[i].prior_milli);
        }
        let observed = self.unsurprising(&amounts, observed.max(0));
        self.fade((self.weight + weight - WEIGHT_MAX).max(0));
        self.weight += weight;
        self.observations += ONE;
        let weighted =
            |one: i64, other: i64| ONE * i128::from(weight) * i128::from(one) * i128::from(other);
        self.squared_total += weighted(observed, observed);
        for i in 0..N {
            for j in 0..N {
                self.squares[i][j] += weighted(amounts[i], amounts[j]);
            }
            self.products[i] += weighted(amounts[i], observed);
        }
        for _ in 0..SWEEPS {
            self.sweep(terms);
        }
        true
    }

    /// Returns the total weight of all observations, faded.
    pub(super) fn weight(&self) -> u32 {
        u32::try_from(self.weight).unwrap_or(0)
    }

    /// Returns the learned cost of one unit of the `i`th amount, in thousandths.
    pub(super) fn coefficient_milli(&self, i: usize) -> i64 {
        self.coefficients_milli[i]
    }

    /// Returns the cost of one unit of the `i`th amount, in thousandths; the prior before anything was
    /// learned.
    pub(super) fn expected_milli(&self, terms: &[Regressor; N], i: usize) -> i64 {
        match self.weight {
            0 => terms[i].prior_milli,
            _ => self.coefficients_milli[i],
        }
    }

    /// Returns the least and the most that the learned cost of one unit of the `i`th amount can be
    /// according to the observations alone, in thousandths. `None` if that is unknown, or if no
    /// value within the bounds agrees with them.
    pub(super) fn range_milli(&self, i: usize) -> Option<(i64, i64)> {
        self.ranges_milli[i]
    }

    fn range(&self, terms: &[Regressor; N], i: usize, scatter: i128) -> Option<(i64, i64)> {
        if self.observations < SCATTER_OBSERVATIONS_MIN * ONE {
            return None;
        }
        let mut normal = self.squares.map(|row| row.map(whole));
        for (j, term) in terms.iter().enumerate() {
            normal[j][j] += self.prior(term) / PRIOR_FADED;
        }
        let is_positive = |it: &i128| *it > 0;
        let of_all = determinant(&normal, 0, 0).filter(is_positive)?;
        // Cramer's rule: what the observations alone would add to the coefficient.
        let mut towards = normal;
        for (j, row) in towards.iter_mut().enumerate() {
            row[i] = self.unmet_milli(j);
        }
        let added = determinant(&towards, 0, 0)? / of_all;
        // How much the amount varies by itself, as a sum of squares: the Schur complement.
        let mut others = normal;
        others[i] = [0; N];
        others[i][i] = 1;
        let of_others = determinant(&others, 0, 0).filter(is_positive)?;
        let varies = Some(of_all / of_others).filter(is_positive)?;
        let free = self.observations - N as i128 * ONE;
        let squares = scatter.checked_mul(ONE)?;
        let error = squares.checked_div(free.checked_mul(varies)?)?;
        let error = STANDARD_ERRORS * error.checked_isqrt()?;
        let alone = added.saturating_add(self.coefficients_milli[i].into());
        let from = alone.saturating_sub(error).min(self.alone_milli(i));
        let to = alone.saturating_add(error);
        let (least, most) = terms[i].bounds_milli;
        let end = |end: i128| i64::try_from(end.clamp(least.into(), most.into())).ok();
        (to >= least.into()).then_some((end(from)?, end(to)?))
    }

    /// Returns the cost of one unit of the `i`th amount if nothing else cost anything, in thousandths:
    /// no cost is negative, so none is higher. Standard errors do not know that, and amounts that
    /// hardly vary have large ones.
    fn alone_milli(&self, i: usize) -> i128 {
        self.products[i] * 1000 / self.squares[i][i].max(1)
    }

    /// Returns what the solution leaves of the `i`th normal equation, because of the priors, the
    /// bounds or too few sweeps, in thousandths.
    fn unmet_milli(&self, i: usize) -> i128 {
        let met = self.squares[i].iter().zip(&self.coefficients_milli);
        let met: i128 = met.map(|(x, c)| x * i128::from(*c)).sum();
        whole(self.products[i] * 1000 - met)
    }

    /// Returns the weighted sum of the squares of what the solution leaves unexplained, in
    /// millionths, but not less than what is credible.
    fn scatter_milli2(&self) -> i128 {
        let mut sum = self.squared_total * 1_000_000;
        for i in 0..N {
            let coefficient = i128::from(self.coefficients_milli[i]);
            sum -= 2000 * coefficient * self.products[i];
            for j in 0..N {
                let other = i128::from(self.coefficients_milli[j]);
                sum += coefficient * other * self.squares[i][j];
            }
        }
        whole(sum.max(self.squared_total * SCATTER_MIN_MILLIONTHS))
    }

    /// Returns the weight of the prior of a coefficient, as a sum of squares.
    fn prior(&self, term: &Regressor) -> i128 {
        let weight = (self.weight / term.kept_in).max(PRIOR_WEIGHT);
        i128::from(weight) * i128::from(term.typical).pow(2)
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
        let (kept, all) = (
            i128::from((self.weight - by).max(0)),
            i128::from(self.weight),
        );
        let faded = |sum: i128| sum * kept / all;
        self.squares = self.squares.map(|row| row.map(faded));
        self.products = self.products.map(faded);
        self.squared_total = faded(self.squared_total);
        self.observations = faded(self.observations);
        self.weight = (self.weight - by).max(0);
    }

    /// Sets each coefficient in turn to its optimum given the others, within its bounds.
    fn sweep(&mut self, terms: &[Regressor; N]) {
        for (i, term) in terms.iter().enumerate() {
            let prior = ONE * self.prior(term);
            let others: i128 = (0..N)
                .filter(|j| *j != i)
                .map(|j| self.squares[i][j] * i128::from(self.coefficients_milli[j]))
                .sum();
            let wanted = self.products[i] * 1000 - others + prior * i128::from(term.prior_milli);
            let scale = (self.squares[i][i] + prior).max(1);
            let (least, most) = term.bounds_milli;
            let best = (wanted / scale).clamp(least.into(), most.into());
            // Within bounds that fit 64 bits.
            self.coefficients_milli[i] = best as i64;
        }
    }
}

/// Returns a sum without the digits behind the point, rounded to the nearest.
fn whole(sum: i128) -> i128 {
    (sum + ONE / 2).div_euclid(ONE)
}

/// Returns the determinant of the rows from `row` on without the columns in the set `used`; `None`
/// if it exceeds 128 bits.
fn determinant<const N: usize>(matrix: &[[i128; N]; N], row: usize, used: u32) -> Option<i128> {
    if row == N {
        return Some(1);
    }
    let (mut sum, mut sign) = (0_i128, 1);
    for column in (0..N).filter(|column| used & (1 << column) == 0) {
        let minor = determinant(matrix, row + 1, used | (1 << column))?;
        sum = sum.checked_add(minor.checked_mul(sign * matrix[row][column])?)?;
        sign = -sign;
    }
    Some(sum)
}
