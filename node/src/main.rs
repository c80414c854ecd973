//! The `quorate` program.

/// It gives freed memory back to the system, and allocates in less time: ADR 0086.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    node::cli::main()
}
