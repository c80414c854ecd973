//! The data plane over loopback: real clients, real connections, engines that misbehave on cue.

mod bad_input;
mod client;
mod drain;
mod engine;
mod faults;
mod fleet;
mod forwarding;
mod leaving;
mod retries;
