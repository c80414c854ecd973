//! The view by itself, against sets of pairs.
