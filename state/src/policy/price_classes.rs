//! Prices that `cost` believes: as few different ones as the measurements allow.
//!
//! Engines of one model are usually alike, but learned prices of equal engines differ by noise. An
//! idle fleet would send everything to the engine with the lowest one, however little that means.
//! Candidates whose prices may be equal, because their ranges have a value in common, therefore
//! share one price. Only a backend that is certainly faster than others is in a class before them.
//!
//! The least number of values that all ranges contain one of is found from below: the lowest upper
//! end is the first value, the lowest upper end of the ranges above it is the next one (interval
//! stabbing: Cormen et al., Introduction to Algorithms, on activity selection).

/// Maximum number of classes. Beyond them, each backend has its own price.
const CLASSES_MAX: usize = 4;

/// A learned price with the range in which it lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct PriceRange {
    pub(super) price: u32,
    /// Least and most that the price can be; `None` if that is unknown.
    pub(super) range: Option<(u32, u32)>,
}

impl PriceRange {
    fn least(self) -> u32 {
        self.range.map_or(0, |(least, _)| least)
    }

    fn most(self) -> u32 {
        self.range.map_or(u32::MAX, |(_, most)| most)
    }
}

/// Candidates whose prices may be equal.
#[derive(Debug, Clone, Copy)]
struct PriceClass {
    /// The most that all ranges of the class contain.
    common: u32,
    /// The price that they share.
    price: u32,
}

/// Classes of candidates, cheapest first.
#[derive(Debug, Clone, Copy)]
pub(super) struct PriceClasses([Option<PriceClass>; CLASSES_MAX]);

impl PriceClasses {
    /// Classifies the candidates with a learned price. The price of a class is the mean of its
    /// members', within their ranges if there are several classes.
    pub(super) fn of(learnt: &(impl Iterator<Item = PriceRange> + Clone)) -> Self {
        let mut classes = [None; CLASSES_MAX];
        let (mut last, mut is_only) = (None, true);
        for class in &mut classes {
            let is_left = |it: &PriceRange| last.is_none_or(|common| it.least() > common);
            let left = learnt.clone().filter(is_left);
            let Some(common) = left.clone().map(PriceRange::most).min() else {
                break;
            };
            let (mut sum, mut count, mut least) = (0_u64, 0_u64, 0);
            for it in left {
                if it.least() > common {
                    is_only = false;
                    continue;
                }
                sum += u64::from(it.price);
                count += 1;
                least = it.least().max(least);
            }
            let mean = u32::try_from(sum / count.max(1)).unwrap_or(u32::MAX);
            *class = Some(PriceClass {
                common,
                price: if is_only {
                    mean
                } else {
                    mean.clamp(least, common)
                },
            });
            last = Some(common);
        }
        Self(classes)
    }

    /// Returns the price of a candidate. One without a learned price has the lowest of the others',
    /// so that it gets requests to learn from; `None` if there is none.
    pub(super) fn price(&self, own: Option<PriceRange>) -> Option<u32> {
        let mut classes = self.0.iter().flatten();
        let Some(own) = own else {
            return classes.next().map(|class| class.price);
        };
        let class = classes.find(|class| own.least() <= class.common);
        Some(class.map_or_else(
            || own.price.clamp(own.least(), own.most()),
            |class| class.price,
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A price and its range.
    type Learnt = (u32, Option<(u32, u32)>);

    fn believed(learnt: &[Learnt]) -> Vec<u32> {
        let ranges: Vec<_> = learnt
            .iter()
            .map(|(price, range)| PriceRange {
                price: *price,
                range: *range,
            })
            .collect();
        let classes = PriceClasses::of(&ranges.iter().copied());
        let prices = ranges.iter().map(|range| classes.price(Some(*range)));
        prices.map(Option::unwrap).collect()
    }

    fn off_by(price: u32, margin: u32) -> Learnt {
        (
            price,
            Some((price.saturating_sub(margin), price.saturating_add(margin))),
        )
    }

    #[test]
    fn prices_that_may_be_equal_are() {
        // As learned by three equal engines on a noisy host.
        let noisy = [1_000, 405_411, 248_175].map(|price| off_by(price, 600_000));
        assert_eq!(believed(&noisy), [218_195; 3]);
        let unknown = [
            (1_000, None),
            off_by(400_000, 4_000),
            off_by(404_000, 4_000),
        ];
        assert_eq!(believed(&unknown), [268_333; 3]);
    }

    #[test]
    fn prices_that_certainly_differ_do() {
        let learnt = [
            off_by(12_000, 2_000),
            off_by(100_000, 9_000),
            off_by(13_000, 1_000),
            off_by(94_000, 3_000),
        ];
        assert_eq!(believed(&learnt), [12_500, 97_000, 12_500, 97_000]);
        let exact = [5, 4, 3, 2, 1, 0].map(|price| off_by(price * 100, 0));
        assert_eq!(believed(&exact), [500, 400, 300, 200, 100, 0]);
    }

    #[test]
    fn a_backend_without_a_price_has_the_lowest() {
        let exact = |price| PriceRange {
            price,
            range: Some((price, price)),
        };
        let classes = PriceClasses::of(&[exact(90), exact(30)].into_iter());
        assert_eq!(classes.price(None), Some(30));
        assert_eq!(PriceClasses::of(&[].into_iter()).price(None), None);
    }

    proptest! {
        /// If all ranges have a value in common, all prices are equal; else each lies within its
        /// range. Whichever is certainly cheaper is believed to be.
        #[test]
        fn believed_prices_differ_only_as_ranges_do(
            learnt in prop::collection::vec(
                (any::<u32>(), prop::option::of((0_u32..2000, 0_u32..500))),
                1..12,
            ),
        ) {
            let ranged = |(price, range): (u32, Option<(u32, u32)>)| {
                (price, range.map(|(least, width)| (least, least + width)))
            };
            let learnt: Vec<Learnt> = learnt.into_iter().map(ranged).collect();
            let prices = believed(&learnt);
            let ends = |learnt: &Learnt| learnt.1.unwrap_or((0, u32::MAX));
            let least_most = learnt.iter().map(|it| ends(it).1).min().unwrap();
            let is_one = learnt.iter().all(|it| ends(it).0 <= least_most);
            for (one, price) in learnt.iter().zip(&prices) {
                let (least, most) = ends(one);
                let lies_within = (least..=most).contains(price) || one.1.is_none();
                let as_expected = if is_one { *price == prices[0] } else { lies_within };
                prop_assert!(as_expected, "{:?}: {}", one, price);
                for (other, other_price) in learnt.iter().zip(&prices) {
                    prop_assert!(most >= ends(other).0 || price < other_price);
                }
            }
        }
    }
}
