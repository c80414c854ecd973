//! The view under every interleaving that loom finds.
