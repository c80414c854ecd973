//! The `quorate` program.

/// Returns freed memory to the system and allocates faster than the system allocator: ADR 0086.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    node::cli::main()
}
