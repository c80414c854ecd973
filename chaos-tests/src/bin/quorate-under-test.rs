//! The `quorate` program, as integration tests of this package run it. Cargo builds it together
//! with the tests, so it is never older than they are and has the same features. This build allows
//! planted bugs, but plants none.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    node::cli::main()
}
