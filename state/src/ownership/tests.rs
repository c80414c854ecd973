//! Readable scenarios, and what the model does not reach.
