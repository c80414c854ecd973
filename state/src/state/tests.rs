//! Scripts and properties of the whole state.
