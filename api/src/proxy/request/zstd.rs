//! Decodes zstd bodies as they arrive, one block of at most 128 KiB at a time.
//!
//! A frame announces its window, which the decoder keeps in memory. RFC 9659 limits it to 8 MiB for
//! HTTP, so frames with a larger one are refused before anything is allocated.

use bytes::Bytes;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::bounded_bytes::BoundedBytes;
use crate::error::ProxyError;

/// Maximum window of a frame, in bytes.
pub(super) const WINDOW_BYTES_MAX: u64 = 8 << 20;
/// Length of the longest header of a frame, in bytes.
const FRAME_HEADER_BYTES_MAX: usize = 18;
/// Length of a block's header, in bytes.
const BLOCK_HEADER_BYTES: usize = 3;
/// Length of the checksum after a frame's last block, in bytes.
const CHECKSUM_BYTES: usize = 4;
/// Maximum length of a block, in bytes.
const BLOCK_BYTES_MAX: u32 = 128 << 10;
/// Position of a frame's descriptor. Its bit 2 announces a checksum, and bit 5 that the window is
/// the whole content. Otherwise, the next byte describes the window.
const DESCRIPTOR_AT: usize = 4;

/// Decoder of a zstd body that arrives in parts.
pub(super) struct ZstdBody {
    decoder: FrameDecoder,
    /// Compressed bytes, of which the first `used` are decoded.
    pending: Vec<u8>,
    used: usize,
    decoded: BoundedBytes,
    stage: FrameStage,
    /// Largest window of a frame so far, in bytes.
    window: u64,
}

/// Where in a body the next byte is.
#[derive(Clone, Copy)]
enum FrameStage {
    /// Before a frame.
    Between { has_begun: bool },
    /// Within a skippable frame, of which this many bytes remain.
    Skipping(usize),
    /// Before a block of a frame, which ends with a checksum or not.
    Within { has_checksum: bool },
}

impl ZstdBody {
    pub(super) fn new(bytes_max: u64) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES_MAX);
        Self {
            decoder,
            pending: Vec::new(),
            used: 0,
            decoded: BoundedBytes::new(bytes_max),
            stage: FrameStage::Between { has_begun: false },
            window: 0,
        }
    }

    /// Returns how many bytes the decoder keeps beside the decoded ones.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Adds a part, which [`Self::advance`] decodes.
    pub(super) fn add(&mut self, part: &[u8]) {
        self.pending.drain(..self.used);
        self.used = 0;
        self.pending.extend_from_slice(part);
    }

    /// Returns the compressed bytes that are not decoded yet.
    fn rest(&self) -> &[u8] {
        &self.pending[self.used..]
    }

    /// Decodes up to the end of the next block. Returns the number of decoded bytes, or `None` if
    /// more of the body is needed. Fails if the body is invalid or too long.
    pub(super) fn advance(&mut self) -> Result<Option<usize>, ProxyError> {
        let before = self.decoded.bytes.len();
        let used = match self.stage {
            FrameStage::Between { .. } => self.begin_frame()?,
            FrameStage::Skipping(left) => {
                let used = left.min(self.rest().len());
                self.stage = match left - used {
                    0 => FrameStage::Between { has_begun: true },
                    left => FrameStage::Skipping(left),
                };
                (used > 0 || left == 0).then_some(used)
            }
            FrameStage::Within { has_checksum } => self.decode_block(has_checksum)?,
        };
        Ok(used.map(|used| {
            self.used += used;
            self.decoded.bytes.len() - before
        }))
    }

    /// Returns the whole decoded body, or an error if it is incomplete.
    pub(super) fn end(mut self) -> Result<Bytes, ProxyError> {
        while self.advance()?.is_some() {}
        match self.stage {
            FrameStage::Between { has_begun: true } if self.rest().is_empty() => {
                Ok(self.decoded.bytes.into())
            }
            _ => Err(self.fault()),
        }
    }

    /// Reads the header of a frame. Returns its length, or `None` if it may be incomplete.
    fn begin_frame(&mut self) -> Result<Option<usize>, ProxyError> {
        let pending = &self.pending[self.used..];
        let mut rest = pending;
        match self.decoder.init(&mut rest) {
            Ok(()) => {
                let (descriptor, window) = (pending[DESCRIPTOR_AT], pending[DESCRIPTOR_AT + 1]);
                let window = match descriptor >> 5 & 1 {
                    1 => self.decoder.content_size(),
                    _ => (1 << (10 + (window >> 3))) / 8 * (8 + u64::from(window & 7)),
                };
                self.window = self.window.max(window);
                let has_checksum = descriptor >> 2 & 1 == 1;
                self.stage = FrameStage::Within { has_checksum };
            }
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => self.stage = FrameStage::Skipping(length as usize),
            Err(_) if pending.len() < FRAME_HEADER_BYTES_MAX => return Ok(None),
            Err(_) => return Err(self.fault()),
        }
        Ok(Some(pending.len() - rest.len()))
    }

    /// Decodes a block if it has arrived, with the checksum after the last one.
    fn decode_block(&mut self, has_checksum: bool) -> Result<Option<usize>, ProxyError> {
        let pending = &self.pending[self.used..];
        let Some(header) = pending.first_chunk::<BLOCK_HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let (is_last, is_repeated) = (header & 1 == 1, header >> 1 & 3 == 1);
        if header >> 3 > BLOCK_BYTES_MAX {
            return Err(self.fault());
        }
        let content = if is_repeated { 1 } else { header >> 3 };
        let checksum = CHECKSUM_BYTES * usize::from(is_last && has_checksum);
        let length = BLOCK_HEADER_BYTES + content as usize + checksum;
        let Some(mut block) = pending.get(..length) else {
            return Ok(None);
        };
        let one = BlockDecodingStrategy::UptoBlocks(1);
        let is_decoded = self.decoder.decode_blocks(&mut block, one).is_ok();
        let is_taken = self.decoder.collect_to_writer(&mut self.decoded).is_ok();
        if !is_decoded || !is_taken {
            return Err(self.fault());
        }
        if is_last {
            let told = self.decoder.get_checksum_from_data();
            if told.is_some() && told != self.decoder.get_calculated_checksum() {
                return Err(self.fault());
            }
            self.stage = FrameStage::Between { has_begun: true };
        }
        Ok(Some(length))
    }

    fn fault(&self) -> ProxyError {
        self.decoded.fault("zstd")
    }
}
