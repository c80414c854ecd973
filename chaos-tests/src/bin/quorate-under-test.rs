//! The `quorate` program, as integration tests of this package run it. Cargo builds it with them, so
//! it is never older than they are, and with the features that they have: bugs can be planted in
//! this build, and none is.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    node::cli::main()
}
