//! Readable scenarios, damaged images, and cases that the model does not reach.

use expect_test::{Expect, expect};
use proptest::prelude::*;

use crate::ids::{BlockHash, Slot};
use crate::ownership::arena::EPOCH_MAX;
use crate::ownership::{Lease, MissingTip, OWNED_BLOCKS_MAX, Ownership};

const GPU: Slot = Slot(3);

/// Returns blocks named by small numbers.
fn blocks(names: &[u64]) -> Vec<BlockHash> {
    names.iter().map(|&name| BlockHash(name)).collect()
}

fn one_backend(capacity: Option<u32>) -> Ownership {
    let mut ownership = Ownership::with_limits(16, OWNED_BLOCKS_MAX);
    ownership.add_backend(GPU, capacity);
    ownership
}

fn acquire(ownership: &mut Ownership, tip: Option<u64>, new: &[u64]) -> Lease {
    ownership
        .acquire(GPU, tip.map(BlockHash), &blocks(new))
        .expect("the tip is owned")
}

/// Returns which of the blocks 0..100 the backend owns.
fn owned(ownership: &Ownership) -> Vec<u64> {
    let view = ownership.view();
    (0..100)
        .filter(|&name| view.owns(GPU, BlockHash(name)))
        .collect()
}

fn check(actual: &[String], expected: &Expect) {
    expected.assert_eq(&(actual.join("\n") + "\n"));
}

#[test]
fn eviction_takes_the_deepest_block_of_the_oldest_release() {
    let mut ownership = one_backend(Some(7));
    let first = acquire(&mut ownership, None, &[1, 2, 3]);
    let second = acquire(&mut ownership, Some(1), &[12, 13]);
    let third = acquire(&mut ownership, None, &[21, 22]);
    ownership.release(second, true);
    ownership.release(first, true);
    ownership.release(third, true);
    let mut steps = vec![format!("full            {:?}", owned(&ownership))];
    for name in 31..37 {
        let lease = acquire(&mut ownership, None, &[name]);
        ownership.release(lease, true);
        steps.push(format!("and another, {name} {:?}", owned(&ownership)));
    }
    check(
        &steps,
        &expect![[r#"
        full            [1, 2, 3, 12, 13, 21, 22]
        and another, 31 [1, 2, 3, 12, 21, 22, 31]
        and another, 32 [1, 2, 3, 21, 22, 31, 32]
        and another, 33 [1, 2, 21, 22, 31, 32, 33]
        and another, 34 [1, 21, 22, 31, 32, 33, 34]
        and another, 35 [21, 22, 31, 32, 33, 34, 35]
        and another, 36 [21, 31, 32, 33, 34, 35, 36]
    "#]],
    );
}

#[test]
fn a_leased_path_is_not_evicted_until_its_release() {
    let mut ownership = one_backend(Some(3));
    let long = acquire(&mut ownership, None, &[1, 2, 3, 4, 5]);
    let mut steps = vec![format!(
        "more than fits, but in use {:?}",
        owned(&ownership)
    )];
    let other = acquire(&mut ownership, Some(2), &[]);
    ownership.release(long, true);
    steps.push(format!(
        "released, two still in use {:?}",
        owned(&ownership)
    ));
    ownership.set_capacity(GPU, Some(1));
    steps.push(format!(
        "less room                  {:?}",
        owned(&ownership)
    ));
    ownership.release(other, true);
    steps.push(format!(
        "all released               {:?}",
        owned(&ownership)
    ));
    check(
        &steps,
        &expect![[r#"
        more than fits, but in use [1, 2, 3, 4, 5]
        released, two still in use [1, 2, 3]
        less room                  [1, 2]
        all released               [1]
    "#]],
    );
}

#[test]
fn a_discarded_attempt_returns_blocks_no_other_covers() {
    let mut ownership = one_backend(None);
    let kept = acquire(&mut ownership, None, &[1, 2]);
    ownership.release(kept, true);
    let failed = acquire(&mut ownership, Some(1), &[12, 13]);
    let also_failed = acquire(&mut ownership, Some(12), &[]);
    let mut steps = vec![format!("both under way     {:?}", owned(&ownership))];
    ownership.release(failed, false);
    steps.push(format!("one discarded      {:?}", owned(&ownership)));
    ownership.release(also_failed, false);
    steps.push(format!("the other, too     {:?}", owned(&ownership)));
    check(
        &steps,
        &expect![[r#"
        both under way     [1, 2, 12, 13]
        one discarded      [1, 2, 12]
        the other, too     [1, 2]
    "#]],
    );
}

#[test]
fn an_extended_lease_pins_its_new_tip() {
    let mut ownership = one_backend(Some(2));
    let mut lease = acquire(&mut ownership, None, &[]);
    assert_eq!(
        lease,
        Lease {
            slot: GPU,
            tip: None,
            inserted: 0
        }
    );
    ownership.extend(&mut lease, &blocks(&[1]));
    ownership.extend(&mut lease, &blocks(&[2, 3]));
    assert_eq!(
        lease,
        Lease {
            slot: GPU,
            tip: Some(BlockHash(3)),
            inserted: 3
        }
    );
    assert_eq!(ownership.check([(GPU, BlockHash(3))]), Ok(()));
    ownership.release(lease, true);
    assert_eq!(owned(&ownership), [1, 2]);
}

#[test]
fn an_unknown_tip_changes_nothing() {
    let mut ownership = one_backend(None);
    let before = ownership.digest();
    assert_eq!(
        ownership.acquire(GPU, Some(BlockHash(9)), &blocks(&[10])),
        Err(MissingTip)
    );
    assert_eq!(
        ownership.acquire(Slot(9), Some(BlockHash(9)), &[]),
        Err(MissingTip)
    );
    assert_eq!((ownership.digest(), ownership.owned_total()), (before, 0));
}

#[test]
fn calls_on_empty_slots_do_nothing() {
    let mut ownership = one_backend(None);
    for slot in [Slot(0), Slot(4), Slot(1024), Slot(u16::MAX)] {
        let mut lease = ownership
            .acquire(slot, None, &blocks(&[1, 2]))
            .expect("no tip is named");
        ownership.extend(&mut lease, &blocks(&[1]));
        ownership.release(lease, true);
        ownership.release(
            Lease {
                slot,
                tip: Some(BlockHash(1)),
                inserted: 1,
            },
            false,
        );
        ownership.set_capacity(slot, Some(1));
        ownership.remove(slot, BlockHash(1), &mut Vec::new());
        ownership.remove_backend(slot);
        assert_eq!(ownership.owned(slot), 0);
    }
    ownership.add_backend(Slot(1024), None);
    assert_eq!(ownership.check([]), Ok(()));
}

#[test]
fn a_chain_ends_at_a_repeated_or_contradicting_block() {
    let mut ownership = one_backend(None);
    let chains: [&[u64]; 5] = [&[1, 1], &[1, 2, 1], &[2], &[1, 2, 3, 2, 4], &[5, 2]];
    let steps = chains.map(|chain| {
        let lease = acquire(&mut ownership, None, chain);
        let tip = lease.tip.map(|tip| tip.0);
        ownership.release(lease, true);
        assert_eq!(ownership.check([]), Ok(()));
        format!("{chain:?} to {tip:?}, owned {:?}", owned(&ownership))
    });
    check(
        &steps,
        &expect![[r#"
        [1, 1] to Some(1), owned [1]
        [1, 2, 1] to Some(2), owned [1, 2]
        [2] to None, owned [1, 2]
        [1, 2, 3, 2, 4] to Some(3), owned [1, 2, 3]
        [5, 2] to Some(5), owned [1, 2, 3, 5]
    "#]],
    );
}

#[test]
fn lease_count_overflow_pins_nothing() {
    let mut ownership = one_backend(None);
    let mut leases = vec![acquire(&mut ownership, None, &[1])];
    while leases.len() < usize::from(u16::MAX) {
        leases.push(acquire(&mut ownership, Some(1), &[]));
    }
    let beyond = acquire(&mut ownership, Some(1), &[]);
    assert_eq!(beyond.tip, None);
    ownership.release(beyond, true);
    for lease in leases {
        assert_eq!(owned(&ownership), [1]);
        ownership.release(lease, true);
    }
    assert_eq!(ownership.check([]), Ok(()));
}

#[test]
fn a_lease_whose_blocks_are_gone_is_reported() {
    let mut ownership = one_backend(Some(10));
    let stale = acquire(&mut ownership, None, &[1, 2]);
    let mut closed_lease_tips = Vec::new();
    ownership.clear(GPU, &mut closed_lease_tips);
    assert_eq!(closed_lease_tips, blocks(&[2]));
    // The lease's holder must forget it; otherwise its release would end the other lease.
    assert_eq!(stale.tip, Some(BlockHash(2)));
    let lease = acquire(&mut ownership, None, &[1, 2]);
    assert_eq!(owned(&ownership), [1, 2]);
    assert_eq!(ownership.check([(GPU, BlockHash(2))]), Ok(()));
    ownership.release(lease, true);
}

#[test]
fn release_epochs_wrap_around_in_order() {
    let mut ownership = one_backend(Some(4));
    for chain in [&[1, 2][..], &[11], &[21]] {
        let lease = acquire(&mut ownership, None, chain);
        ownership.release(lease, true);
    }
    let lease = acquire(&mut ownership, Some(11), &[]);
    let backend = ownership.backends[usize::from(GPU.0)]
        .as_mut()
        .expect("it was added");
    backend.epoch = EPOCH_MAX;
    ownership.release(lease, true);
    assert_eq!(ownership.check([]), Ok(()));
    let mut steps = Vec::new();
    for name in 31..35 {
        let lease = acquire(&mut ownership, None, &[name]);
        ownership.release(lease, true);
        steps.push(format!("{:?}", owned(&ownership)));
    }
    check(
        &steps,
        &expect![[r#"
        [1, 11, 21, 31]
        [11, 21, 31, 32]
        [11, 31, 32, 33]
        [31, 32, 33, 34]
    "#]],
    );
}

#[test]
fn the_inserting_backend_pays_for_the_total_block_bound() {
    let mut ownership = Ownership::with_limits(1, 6);
    ownership.add_backend(Slot(0), None);
    ownership.add_backend(GPU, None);
    let other = ownership
        .acquire(Slot(0), None, &blocks(&[51, 52]))
        .expect("no tip is named");
    ownership.release(other, true);
    let lease = acquire(&mut ownership, None, &[1, 2, 3]);
    ownership.release(lease, true);
    let lease = acquire(&mut ownership, None, &[11, 12]);
    assert_eq!(
        (owned(&ownership), ownership.owned(Slot(0))),
        (vec![1, 2, 11, 12], 2)
    );
    let wide = acquire(&mut ownership, None, &[21, 22, 23, 24]);
    assert_eq!(
        (owned(&ownership), wide.tip),
        (vec![11, 12, 21, 22], Some(BlockHash(22)))
    );
    assert_eq!(
        ownership.check([(GPU, BlockHash(12)), (GPU, BlockHash(22))]),
        Ok(())
    );
    ownership.release(lease, true);
    ownership.release(wide, true);
}

#[test]
fn removing_an_inner_block_takes_its_descendants_only() {
    let mut ownership = one_backend(None);
    for chain in [&[1, 2, 3, 4][..], &[1, 2, 13], &[1, 22, 23]] {
        let lease = acquire(&mut ownership, None, chain);
        ownership.release(lease, true);
    }
    assert_eq!(ownership.remove(GPU, BlockHash(2), &mut Vec::new()), 4);
    assert_eq!(owned(&ownership), [1, 22, 23]);
    assert_eq!(ownership.remove(GPU, BlockHash(23), &mut Vec::new()), 1);
    assert_eq!(ownership.remove(GPU, BlockHash(99), &mut Vec::new()), 0);
    assert_eq!(ownership.check([]), Ok(()));
}

#[test]
fn removal_evicts_unpinned_blocks_beyond_the_capacity() {
    let mut ownership = one_backend(Some(1));
    let outer = acquire(&mut ownership, None, &[1]);
    let inner = acquire(&mut ownership, Some(1), &[2]);
    let other = acquire(&mut ownership, None, &[3]);
    ownership.release(outer, true);
    assert_eq!(owned(&ownership), [1, 2, 3]);
    let mut closed_lease_tips = Vec::new();
    assert_eq!(
        ownership.remove(GPU, BlockHash(2), &mut closed_lease_tips),
        1
    );
    assert_eq!(
        (owned(&ownership), closed_lease_tips),
        (vec![3], blocks(&[2]))
    );
    assert_eq!(inner.tip, Some(BlockHash(2)));
    assert_eq!(ownership.check([(GPU, BlockHash(3))]), Ok(()));
    ownership.release(other, true);
    assert_eq!(ownership.check([]), Ok(()));
}

#[test]
fn digests_depend_on_content_only() {
    let digest = |order: [u64; 3]| {
        let mut ownership = one_backend(None);
        let leases = order.map(|name| acquire(&mut ownership, None, &[name, name + 10]));
        leases
            .into_iter()
            .for_each(|lease| ownership.release(lease, false));
        let last = acquire(&mut ownership, None, &[1, 2]);
        ownership.release(last, true);
        ownership.digest()
    };
    assert_eq!(digest([1, 2, 3]), digest([3, 1, 2]));
    let empty = one_backend(None).digest();
    assert_ne!(empty, one_backend(Some(4)).digest());
    assert_ne!(empty, Ownership::new().digest());
    assert_ne!(empty, digest([1, 2, 3]));
}

#[test]
fn a_frozen_image_ignores_later_writes() {
    let mut ownership = one_backend(Some(3000));
    for chain in 0..40 {
        let names: Vec<u64> = (0..100).map(|block| chain * 1000 + block).collect();
        let lease = acquire(&mut ownership, None, &names);
        ownership.release(lease, true);
    }
    let frozen = ownership.freeze();
    let digest = ownership.digest();
    for chain in 40..80 {
        let names: Vec<u64> = (0..100).map(|block| chain * 1000 + block).collect();
        let lease = acquire(&mut ownership, None, &names);
        ownership.release(lease, true);
    }
    assert_ne!(ownership.digest(), digest);
    let mut image = Vec::new();
    frozen.write_to(&mut image).expect("memory does not fail");
    let per_block = image.len() as u64 / ownership.owned_total();
    assert!(per_block <= 24, "{per_block} bytes per block");
    let view = ownership.view();
    ownership
        .restore(&mut &image[..])
        .expect("it was written just now");
    assert_eq!((ownership.digest(), ownership.check([])), (digest, Ok(())));
    assert!(view.owns(GPU, BlockHash(39_000)) && !view.owns(GPU, BlockHash(79_000)));
}

/// Returns a small image with several backends, forks, holes and open leases.
fn image() -> (Vec<u8>, u128) {
    let mut ownership = Ownership::with_limits(4, 1000);
    for slot in [0, 3, 900] {
        ownership.add_backend(Slot(slot), (slot != 3).then_some(6));
        for chain in [&[1, 2, 3][..], &[1, 2, 13, 14], &[41, 42, 43]] {
            let lease = ownership
                .acquire(Slot(slot), None, &blocks(chain))
                .expect("no tip");
            ownership.release(lease, true);
        }
    }
    let open = ownership
        .acquire(GPU, Some(BlockHash(2)), &blocks(&[77]))
        .expect("2 is owned");
    assert_eq!(open.inserted, 1);
    ownership.remove(GPU, BlockHash(13), &mut Vec::new());
    let mut image = Vec::new();
    ownership
        .freeze()
        .write_to(&mut image)
        .expect("memory does not fail");
    (image, ownership.digest())
}

#[test]
fn a_truncated_image_is_refused_and_changes_nothing() {
    let (image, digest) = image();
    let mut ownership = one_backend(Some(5));
    let lease = acquire(&mut ownership, None, &[7]);
    let before = ownership.digest();
    for length in 0..image.len() {
        let error = ownership
            .restore(&mut &image[..length])
            .expect_err("it is cut short");
        assert!(error.offset <= length as u64, "{error}");
        assert_eq!((ownership.digest(), owned(&ownership)), (before, vec![7]));
    }
    ownership.release(lease, true);
    ownership.restore(&mut &image[..]).expect("it is whole");
    assert_eq!(ownership.digest(), digest);
}

#[test]
fn ownership_image_has_golden_bytes() {
    let mut ownership = one_backend(Some(5));
    let lease = acquire(&mut ownership, None, &[7, 8]);
    ownership.release(lease, true);
    let mut image = Vec::new();
    ownership
        .freeze()
        .write_to(&mut image)
        .expect("memory does not fail");
    let hex: String = image.iter().map(|byte| format!("{byte:02x}")).collect();
    let lines: Vec<String> = hex
        .as_bytes()
        .chunks(64)
        .map(|c| String::from_utf8_lossy(c).into())
        .collect();
    check(
        &lines,
        &expect![[r#"
        1000000051554f524f574e5301000000010000009ef0616cf5493c6c17000000
        030001050000000100000000000000020000000200000001b3afa427c77332a6
        0000000300000000000000000000000000000000000000000000000000000000
        0000000000000000000000000000000000000000000000000000000000000000
        0000000000000000000000000000000000000000000000000000000000000000
        0000000000000000000000000000000000000000000000000000000000000000
        00000007000000000000000800000000000000ffffffff000000000000000000
        010000000000000000fc042abc2847dbae10000000547e12daf469ba2d2b97a1
        7a25c35de3720c892af8958a92
    "#]],
    );
}

/// Recomputes the checksums of an image whose payloads were tampered with.
fn with_right_checksums(image: &mut [u8]) {
    let (mut at, mut section) = (0, 0);
    while at + 4 <= image.len() {
        let length = u32::from_le_bytes(image[at..at + 4].try_into().expect("four bytes")) as usize;
        let end = at + 4 + length;
        if end + 8 > image.len() {
            return;
        }
        let sum = xxhash_rust::xxh3::xxh3_64_with_seed(&image[at + 4..end], section);
        image[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        (at, section) = (end + 8, section + 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn an_image_with_any_byte_changed_is_refused(at in any::<prop::sample::Index>(), flip in 1_u8..) {
        let (mut image, _) = image();
        let at = at.index(image.len());
        image[at] ^= flip;
        let mut ownership = one_backend(Some(5));
        let before = ownership.digest();
        prop_assert!(ownership.restore(&mut &image[..]).is_err());
        prop_assert_eq!(ownership.digest(), before);
    }

    /// Checks images with valid checksums, which a hostile peer could forge.
    #[test]
    fn forged_images_are_refused_or_sound(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        has_right_digest in any::<bool>(),
    ) {
        let changes = changes.into_iter().map(|(at, byte)| (at.index(image().0.len()), byte));
        refused_or_sound(changes, has_right_digest);
    }
}

/// The image contains only small numbers, so zeroing one byte may break a relation between two of
/// them.
#[test]
fn images_with_a_zeroed_byte_are_refused_or_sound() {
    for at in 0..image().0.len() {
        refused_or_sound([(at, 0)], true);
    }
}

/// Restores an image with some bytes changed, and with its checksums and perhaps its digest
/// corrected.
fn refused_or_sound(changes: impl IntoIterator<Item = (usize, u8)>, has_right_digest: bool) {
    let (mut image, digest) = image();
    for (at, byte) in changes {
        image[at] = byte;
    }
    with_right_checksums(&mut image);
    let mut ownership = one_backend(Some(5));
    let restored = ownership.restore(&mut &image[..]);
    let mut error = restored.err().map(|error| error.what);
    if has_right_digest
        && let Some(what) = &error
        && what.starts_with("digest ")
    {
        // The message contains the digest that would have been right.
        let right = what.rsplit(' ').next().expect("it has words");
        let right = u128::from_str_radix(right, 16).expect("hex digits");
        let place = image.len() - 8 - 16;
        image[place..place + 16].copy_from_slice(&right.to_le_bytes());
        with_right_checksums(&mut image);
        let restored = ownership.restore(&mut &image[..]);
        error = restored.err().map(|error| error.what);
    }
    if error.is_none() {
        let same = ownership.digest() == digest;
        let open = open_leases(&ownership);
        assert_eq!(ownership.check(open), Ok(()), "the same: {same}");
    }
}

/// Returns the slot and the tip of each open lease.
fn open_leases(ownership: &Ownership) -> Vec<(Slot, BlockHash)> {
    let backends = ownership.backends.iter().flatten();
    let leases = backends.flat_map(|backend| {
        let records = backend.arena.live();
        records.flat_map(|(_, record)| {
            std::iter::repeat_n((backend.slot, record.hash), record.leases.into())
        })
    });
    leases.collect()
}
