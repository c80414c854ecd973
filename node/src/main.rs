//! The `quorate` program.

/// Allocator that returns freed memory to the system and is faster than the system's (ADR 0048).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    node::cli::main()
}
