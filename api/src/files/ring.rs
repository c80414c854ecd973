//! A bounded ring of frames on disk, for facts that are worth keeping but not worth waiting for.
//!
//! The ring is a folder of numbered segments. A frame is appended to the newest segment; once the
//! ring has its maximum size, the oldest segment is removed. A frame is its length and its CRC-32
//! (four bytes each, little-endian), then the payload. Nothing is synced: a killed process loses
//! nothing, a host without power its last seconds. The end of a segment may therefore be torn.
//! Readers ignore a segment from its first damaged frame on, and a segment whose file is gone. Each
//! opening begins a segment, so that places ascend also after a loss.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum length of a payload, in bytes.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 256 << 10;
/// Minimum size of a ring, in bytes, so that a segment holds any frame.
pub const RING_BYTES_MIN: u64 = SEGMENTS * 4 * PAYLOAD_BYTES_MAX as u64;
/// Maximum size of a ring, in bytes.
pub const RING_BYTES_MAX: u64 = 32 << 30;
/// Minimum number of segments of a full ring.
const SEGMENTS: u64 = 16;
/// Maximum length of a segment, in bytes. Readers hold one at a time in memory.
const SEGMENT_BYTES_MAX: u64 = 16 << 20;
/// Length of a frame before its payload, in bytes.
const HEAD_BYTES: usize = 8;
const EXTENSION: &str = "ring";

/// Place in a ring. Later frames have greater places, also after the oldest segments are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct RingPosition(pub u64);

impl RingPosition {
    /// Place after all frames.
    pub const MAX: Self = Self(u64::MAX);

    fn new(segment: u32, offset: u32) -> Self {
        Self((u64::from(segment) << 32) | u64::from(offset))
    }

    fn segment(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(u32::MAX)
    }

    fn offset(self) -> u32 {
        u32::try_from(self.0 & u64::from(u32::MAX)).unwrap_or(u32::MAX)
    }
}

/// Place and size of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingSettings {
    /// Folder of its files, which holds nothing else.
    pub folder: PathBuf,
    /// Maximum size of its files, in bytes.
    pub bytes_max: u64,
}

/// Appends `payload` as a frame to `frames`. Returns `false`, and appends nothing, if it is too
/// long.
pub(crate) fn push_frame(frames: &mut Vec<u8>, payload: &[u8]) -> bool {
    let Some(length) = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= PAYLOAD_BYTES_MAX)
    else {
        return false;
    };
    frames.extend_from_slice(&length.to_le_bytes());
    frames.extend_from_slice(&crc32fast::hash(payload).to_le_bytes());
    frames.extend_from_slice(payload);
    true
}

/// Iterator over the intact frames at the beginning of some bytes.
#[derive(Debug, Clone)]
pub(crate) struct Frames<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Frames<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Returns the number of bytes of the frames so far.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.bytes.get(self.offset..)?.split_first_chunk()?;
        let (crc, rest) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let payload = rest.get(..length).filter(|_| length <= PAYLOAD_BYTES_MAX)?;
        if crc32fast::hash(payload) != u32::from_le_bytes(*crc) {
            return None;
        }
        self.offset += HEAD_BYTES + length;
        Some(payload)
    }
}

/// An open ring. One process at a time may open it.
#[derive(Debug)]
pub(crate) struct FrameRing {
    folder: PathBuf,
    bytes_max: u64,
    /// Segments in ascending order of their numbers.
    segments: VecDeque<Segment>,
    /// File of the newest segment; `None` if the next frame begins a segment.
    file: Option<File>,
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    number: u32,
    /// Length of its intact frames.
    bytes: u32,
}

impl Segment {
    fn end(self) -> RingPosition {
        RingPosition::new(self.number, self.bytes)
    }

    /// Returns at most `bytes_max` of the bytes from `offset` on; nothing if the file is gone.
    fn read(self, folder: &Path, offset: u32, bytes_max: usize) -> io::Result<Vec<u8>> {
        let length = usize::try_from(self.bytes - offset).map_err(io::Error::other)?;
        let mut bytes = vec![0; length.min(bytes_max)];
        match File::open(path(folder, self.number)) {
            Ok(file) => file.read_exact_at(&mut bytes, offset.into())?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => bytes.clear(),
            Err(error) => return Err(error),
        }
        Ok(bytes)
    }
}

impl FrameRing {
    /// Opens the ring in `folder`, which it creates if necessary, and passes all payloads to `each`,
    /// the oldest first. Warns of damaged segments.
    ///
    /// # Errors
    /// Fails if the folder or its files cannot be read or written.
    pub(crate) fn open(
        folder: &Path,
        bytes_max: u64,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut ring = Self {
            folder: folder.to_owned(),
            bytes_max: bytes_max.clamp(RING_BYTES_MIN, RING_BYTES_MAX),
            segments: VecDeque::new(),
            file: None,
        };
        let mut numbers = Vec::new();
        for entry in fs::read_dir(folder)? {
            numbers.extend(segment_number(&entry?.path()));
        }
        numbers.sort_unstable();
        for number in numbers {
            let bytes = fs::read(ring.path(number))?;
            let mut frames = Frames::new(&bytes);
            frames.by_ref().for_each(&mut each);
            let intact = frames.offset();
            if intact < bytes.len() {
                let (file, damaged) = (ring.path(number), bytes.len() - intact);
                tracing::warn!(
                    file = %file.display(),
                    intact_bytes = intact,
                    damaged_bytes = damaged,
                    "a file of past decisions is damaged or torn at its end, which is ignored"
                );
            }
            let bytes = u32::try_from(intact).unwrap_or(u32::MAX);
            ring.segments.push_back(Segment { number, bytes });
        }
        ring.shrink(0)?;
        Ok(ring)
    }

    /// Returns the place after the newest frame.
    pub(crate) fn end(&self) -> RingPosition {
        self.segments
            .back()
            .map_or_else(RingPosition::default, |newest| newest.end())
    }

    /// Returns the size of all segments, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|it| u64::from(it.bytes)).sum()
    }

    /// Appends `frames`, made by [`push_frame`], and removes the oldest segments if there is no
    /// room. `now_s` is the Unix time in seconds: a new segment's number is at least that, so that
    /// places also ascend if somebody empties the folder.
    ///
    /// # Errors
    /// Fails if the disk does. The ring is then as before.
    pub(crate) fn append(&mut self, frames: &[u8], now_s: u32) -> io::Result<()> {
        let added = frames.len() as u64;
        let newest = self.segments.back().copied();
        let is_full = |newest: Segment| {
            let bytes_max = (self.bytes_max / SEGMENTS).min(SEGMENT_BYTES_MAX);
            newest.bytes > 0 && u64::from(newest.bytes) + added > bytes_max
        };
        // Somebody may have emptied the folder: what is written to a removed file is lost.
        let is_there = |newest: Segment| self.path(newest.number).exists();
        let is_gone = newest.is_some_and(|newest| !is_there(newest));
        if self.file.is_none() || is_gone || newest.is_none_or(is_full) {
            self.begin(now_s)?;
        }
        self.shrink(added)?;
        let (Some(file), Some(newest)) = (&mut self.file, self.segments.back_mut()) else {
            return Err(io::Error::other("the ring has no segment"));
        };
        let length = u32::try_from(frames.len()).map_err(io::Error::other)?;
        if let Err(error) = file.write_all(frames) {
            // A part of a frame would hide those after it.
            if file.set_len(newest.bytes.into()).is_err() {
                self.file = None;
            }
            return Err(error);
        }
        newest.bytes = newest.bytes.saturating_add(length);
        Ok(())
    }

    fn begin(&mut self, now_s: u32) -> io::Result<()> {
        let after = self.segments.back().map_or(0, |it| it.number + 1);
        let number = after.max(now_s);
        let path = self.path(number);
        self.file = Some(
            OpenOptions::new()
                .append(true)
                .create_new(true)
                .open(path)?,
        );
        self.segments.push_back(Segment { number, bytes: 0 });
        Ok(())
    }

    /// Removes the oldest segments until there is room for `added` bytes.
    fn shrink(&mut self, added: u64) -> io::Result<()> {
        while self.segments.len() > 1 && self.bytes() + added > self.bytes_max {
            if let Some(oldest) = self.segments.front() {
                match fs::remove_file(self.path(oldest.number)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    Ok(()) | Err(_) => drop(self.segments.pop_front()),
                }
            }
        }
        Ok(())
    }

    /// Returns a reader of what the ring holds now, which goes on while frames are appended.
    pub(crate) fn reader(&self) -> RingReader {
        RingReader {
            folder: self.folder.clone(),
            segments: self.segments.iter().copied().collect(),
        }
    }

    /// Returns at most `bytes_max` of the frames after `position`, the oldest first, and the place
    /// after them. A part that is gone or damaged is skipped.
    ///
    /// # Errors
    /// Fails if the disk does.
    pub(crate) fn after(
        &self,
        position: RingPosition,
        bytes_max: usize,
    ) -> io::Result<(Vec<u8>, RingPosition)> {
        let Some(segment) = self.segments.iter().find(|it| it.end() > position) else {
            return Ok((Vec::new(), self.end()));
        };
        let offset = match segment.number == position.segment() {
            true => position.offset(),
            false => 0,
        };
        let mut bytes = segment.read(&self.folder, offset, bytes_max)?;
        let mut frames = Frames::new(&bytes);
        frames.by_ref().for_each(drop);
        let intact = frames.offset();
        bytes.truncate(intact);
        let end = match u32::try_from(intact) {
            Ok(intact) if intact > 0 => RingPosition::new(segment.number, offset + intact),
            Ok(_) | Err(_) => segment.end(),
        };
        Ok((bytes, end))
    }

    fn path(&self, number: u32) -> PathBuf {
        path(&self.folder, number)
    }
}

/// Reader of a ring as it was at one moment. Segments that are removed meanwhile are skipped.
#[derive(Debug)]
pub(crate) struct RingReader {
    folder: PathBuf,
    segments: Vec<Segment>,
}

impl RingReader {
    /// Passes the payloads before `before` to `each`, the newest first, with their places, until it
    /// breaks.
    ///
    /// # Errors
    /// Fails if the disk does.
    pub(crate) fn newest(
        &self,
        before: RingPosition,
        mut each: impl FnMut(RingPosition, &[u8]) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let wanted = |it: &&Segment| it.number <= before.segment();
        for segment in self.segments.iter().rev().filter(wanted) {
            let bytes = segment.read(&self.folder, 0, usize::MAX)?;
            let mut frames = Frames::new(&bytes);
            let mut found = Vec::new();
            loop {
                let offset = u32::try_from(frames.offset()).unwrap_or(u32::MAX);
                let at = RingPosition::new(segment.number, offset);
                match frames.next() {
                    Some(payload) if at < before => found.push((at, payload)),
                    Some(_) | None => break,
                }
            }
            for (at, payload) in found.into_iter().rev() {
                if each(at, payload).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

fn path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("{number:010}.{EXTENSION}"))
}

/// Returns the number of the segment in this file; `None` if it is another file.
fn segment_number(path: &Path) -> Option<u32> {
    let is_segment = path.extension().is_some_and(|it| it == EXTENSION);
    path.file_stem()?
        .to_str()?
        .parse()
        .ok()
        .filter(|_| is_segment)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(folder: &Path) -> (FrameRing, Vec<Vec<u8>>) {
        let mut found = Vec::new();
        let ring = FrameRing::open(folder, RING_BYTES_MIN, |it| found.push(it.to_vec()));
        (ring.unwrap(), found)
    }

    fn framed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut frames = Vec::new();
        for payload in payloads {
            assert!(push_frame(&mut frames, payload));
        }
        frames
    }

    fn newest(ring: &FrameRing) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let seen = ring.reader().newest(RingPosition::MAX, |_, payload| {
            found.push(payload.to_vec());
            ControlFlow::Continue(())
        });
        seen.unwrap();
        found
    }

    fn only_file(folder: &Path) -> PathBuf {
        let mut files = fs::read_dir(folder).unwrap();
        let file = files.next().unwrap().unwrap().path();
        assert!(files.next().is_none());
        file
    }

    proptest! {
        #[test]
        fn a_torn_end_loses_only_the_frames_that_it_touches(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..20),
            cut in any::<prop::sample::Index>(),
            garbage in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (mut ring, _) = open(folder.path());
            ring.append(&framed(&payloads), 5).unwrap();
            drop(ring);
            let file = only_file(folder.path());
            let whole = fs::read(&file).unwrap();
            let cut = cut.index(whole.len() + 1);
            let torn = [&whole[..cut], &garbage[..]].concat();
            // Garbage may happen to continue the file as it was.
            let same = whole.iter().zip(&torn).take_while(|(before, after)| before == after);
            let same = same.count();
            fs::write(&file, torn).unwrap();
            let kept = (0..payloads.len()).take_while(|at| framed(&payloads[..=*at]).len() <= same);
            let kept = kept.count();
            let (mut ring, found) = open(folder.path());
            prop_assert_eq!(&found[..kept], &payloads[..kept]);
            // Eight zero bytes are an empty frame.
            prop_assert!(found[kept..].iter().all(Vec::is_empty));
            ring.append(&framed(&[b"next".to_vec()]), 6).unwrap();
            let newest = newest(&ring);
            prop_assert_eq!(newest[0].as_slice(), b"next");
            let (_, again) = open(folder.path());
            prop_assert_eq!(again.len(), found.len() + 1);
        }
    }

    #[test]
    fn a_ring_stays_within_its_bytes_and_keeps_the_newest_frames() {
        let folder = tempfile::tempdir().unwrap();
        let (mut ring, _) = open(folder.path());
        let payload = |number: u32| [&number.to_le_bytes()[..], &[7; 100_000]].concat();
        let mut middle = RingPosition::default();
        for number in 0..400 {
            ring.append(&framed(&[payload(number)]), 5).unwrap();
            assert!(ring.bytes() <= RING_BYTES_MIN, "{}", ring.bytes());
            if number == 200 {
                middle = ring.end();
            }
        }
        let files = fs::read_dir(folder.path()).unwrap();
        let on_disk: u64 = files.map(|it| it.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(on_disk, ring.bytes());
        let found = newest(&ring);
        let expected: Vec<_> = (0..400).rev().map(payload).take(found.len()).collect();
        assert!(found == expected && found.len() as u64 > RING_BYTES_MIN * 9 / 10 / 100_012);
        let (_, reopened) = open(folder.path());
        assert!(reopened.into_iter().rev().eq(found.iter().cloned()));
        // A reader that was left behind goes on with the oldest frame, any other where it was.
        for (from, first) in [
            (RingPosition::default(), 400 - found.len() as u32),
            (
                middle,
                if found.len() > 199 {
                    201
                } else {
                    400 - found.len() as u32
                },
            ),
        ] {
            let (mut at, mut numbers) = (from, Vec::new());
            while at < ring.end() {
                let (frames, next) = ring.after(at, 300_000).unwrap();
                let number = |it: &[u8]| u32::from_le_bytes(*it.first_chunk().unwrap());
                numbers.extend(Frames::new(&frames).map(number));
                assert!(next > at);
                at = next;
            }
            assert!(numbers.into_iter().eq(first..400));
        }
    }

    #[test]
    fn a_damaged_segment_is_skipped_and_places_ascend_in_an_emptied_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (mut ring, _) = open(folder.path());
        ring.append(&framed(&[b"a".to_vec(), b"b".to_vec()]), 5)
            .unwrap();
        let file = only_file(folder.path());
        ring.file = None;
        ring.append(&framed(&[b"c".to_vec()]), 5).unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes[8] ^= 1;
        fs::write(&file, bytes).unwrap();
        let (ring, found) = open(folder.path());
        assert_eq!(
            (found, newest(&ring)),
            (vec![b"c".to_vec()], vec![b"c".to_vec()])
        );
        let (none, at) = ring.after(RingPosition::default(), 1000).unwrap();
        assert!(none.is_empty());
        assert_eq!(ring.after(at, 1000).unwrap().0, framed(&[b"c".to_vec()]));
        let before = ring.end();
        fs::remove_dir_all(folder.path()).unwrap();
        let (mut ring, found) = open(folder.path());
        assert!(found.is_empty());
        ring.append(&framed(&[b"d".to_vec()]), 9).unwrap();
        assert!(ring.end() > before);
        assert!(!push_frame(
            &mut Vec::new(),
            &vec![0; PAYLOAD_BYTES_MAX + 1]
        ));
    }

    #[test]
    fn an_unwritable_folder_is_an_error_and_not_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(FrameRing::open(&file.join("ring"), RING_BYTES_MIN, |_| {}).is_err());
        let (mut ring, _) = open(&folder.path().join("ring"));
        fs::remove_dir(folder.path().join("ring")).unwrap();
        assert!(ring.append(&framed(&[b"a".to_vec()]), 5).is_err());
        assert_eq!(ring.end(), RingPosition::default());
        fs::create_dir(folder.path().join("ring")).unwrap();
        ring.append(&framed(&[b"a".to_vec()]), 5).unwrap();
        assert_eq!(newest(&ring), [b"a".to_vec()]);
    }
}
