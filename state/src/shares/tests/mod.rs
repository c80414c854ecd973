//! Shares: the arithmetic, and clusters of books.

mod model;
mod split;
