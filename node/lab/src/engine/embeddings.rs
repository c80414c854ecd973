//! `/v1/embeddings`: embedding requests, whose prompts are computed and cached like any other.
//! Vectors have length 1 and are derived from the prompt, so that equal prompts have equal vectors.

use api::prompt::Prompt;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Default number of dimensions of a vector.
const DIMENSIONS: u32 = 64;
/// Maximum number of dimensions of a vector.
const DIMENSIONS_MAX: u32 = 4096;
/// Maximum number of prompts per request.
pub(super) const INPUTS_MAX: usize = 2048;

/// Body of an embeddings request, in OpenAI's format.
#[derive(Debug, Deserialize)]
pub(super) struct EmbeddingsRequest {
    pub(super) input: EmbeddingInput,
    #[serde(default)]
    encoding_format: EncodingFormat,
    dimensions: Option<u32>,
}

/// One prompt or several, as text or as tokens.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum EmbeddingInput {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

impl EmbeddingInput {
    /// Returns the prompts, in order.
    pub(super) fn prompts(self) -> Vec<Prompt> {
        let text = |text: String| Prompt::Text(text.into_bytes());
        match self {
            Self::Text(one) => vec![text(one)],
            Self::Tokens(one) => vec![Prompt::Tokens(one)],
            Self::Texts(many) => many.into_iter().map(text).collect(),
            Self::TokenLists(many) => many.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

impl EmbeddingsRequest {
    /// Returns an error message if the number of dimensions is zero or above [`DIMENSIONS_MAX`].
    pub(super) fn check_dimensions(&self) -> Result<(), String> {
        match self.dimensions {
            Some(0) => Err("dimensions must be at least 1, got 0.".to_owned()),
            Some(many) if many > DIMENSIONS_MAX => Err(format!(
                "dimensions must be at most {DIMENSIONS_MAX}, got {many}."
            )),
            _ => Ok(()),
        }
    }

    /// Returns the requested encoding and length of the vectors.
    pub(super) fn form(&self) -> VectorForm {
        VectorForm {
            encoding: self.encoding_format,
            dimensions: self.dimensions.unwrap_or(DIMENSIONS),
        }
    }
}

/// Encoding and length of the vectors of a response.
#[derive(Debug, Clone, Copy)]
pub(super) struct VectorForm {
    encoding: EncodingFormat,
    dimensions: u32,
}

impl VectorForm {
    /// Returns the response's entry for the prompt at `index`, with the vector of `output_seed`.
    pub(super) fn entry(self, index: usize, output_seed: u64) -> Value {
        let numbers = self.vector(output_seed);
        let embedding = match self.encoding {
            EncodingFormat::Float => json!(numbers),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = numbers.iter().flat_map(|it| it.to_le_bytes()).collect();
                json!(STANDARD.encode(bytes))
            }
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    }

    fn vector(self, output_seed: u64) -> Vec<f32> {
        let draw = |at: u32| {
            let bits = (xxh3_64_with_seed(&at.to_le_bytes(), output_seed) >> 48) as u16;
            f32::from(bits) - f32::from(u16::MAX) / 2.0
        };
        let drawn: Vec<f32> = (0..self.dimensions).map(draw).collect();
        let length = drawn.iter().map(|it| it * it).sum::<f32>().sqrt();
        drawn.iter().map(|it| it / length).collect()
    }
}
