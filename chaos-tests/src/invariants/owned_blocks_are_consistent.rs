//! The invariants I1 and I3, checked from outside on reported blocks. A backend that owns a block
//! owns every block before it, and it exceeds its capacity only while nothing can be evicted.

use std::collections::BTreeSet;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::image::BackendImage;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I37";
/// Statement of the invariant.
pub const NAME: &str = "ownership is prefix-closed and within capacity";

/// Checks every backend of every state image.
///
/// # Errors
/// If a backend violates I1 or I3.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for (_, run, image) in &record.observation.images {
        for (name, backend) in &image.backends {
            subjects += u64::from(!backend.owned.is_empty());
            is_sound(backend).map_err(|why| {
                let detail = format!("{run}, index {}, backend {name}: {why}", image.index);
                super::violation(NUMBER, NAME, detail)
            })?;
        }
    }
    Ok(subjects)
}

fn is_sound(backend: &BackendImage) -> Result<(), String> {
    let mut parents = BTreeSet::new();
    for (block, it) in &backend.owned {
        let Some(parent) = it.parent else {
            continue;
        };
        parents.insert(parent);
        if !backend.owned.contains_key(&parent) {
            return Err(format!("{block} is owned, {parent} before it is not"));
        }
    }
    let brought = backend.owned.values().filter(|it| it.reports == 0).count();
    let can_go = |(block, it): (&_, &crate::oracle::image::OwnedImage)| {
        it.leases == 0 && it.reports == 0 && !parents.contains(block)
    };
    let capacity = backend.capacity_blocks.map(|blocks| blocks as usize);
    if capacity.is_some_and(|capacity| brought > capacity) && backend.owned.iter().any(can_go) {
        return Err(format!(
            "{brought} blocks are owned, {capacity:?} fit, and some could go"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    fn broken(change: impl FnOnce(&mut BackendImage)) -> Result<Subjects, PropertyError> {
        let mut story = RecordBuilder::lively();
        story.image(|image| {
            let mut backends = image.backends.values_mut();
            change(backends.find(|it| it.owned.len() > 2).unwrap());
        });
        check(&story.record)
    }

    #[test]
    fn an_ownership_gap_is_detected() {
        assert!(broken(|_| {}).is_ok_and(|subjects| subjects > 0));
        assert!(broken(|it| it.owned.retain(|_, block| block.parent.is_some())).is_err());
    }

    #[test]
    fn an_extra_owned_block_is_detected() {
        assert!(broken(|it| it.capacity_blocks = Some(1)).is_err());
    }
}
