//! Maps of sessions and trees, which the table changes and readers share.

use super::{AgentSession, SessionTree};
use crate::cow::{CowMap, ShardKey};
use crate::ids::AgentSessionKey;

pub(super) type SessionMap = CowMap<AgentSessionKey, AgentSession>;
pub(super) type TreeMap = CowMap<AgentSessionKey, SessionTree>;

impl ShardKey for AgentSessionKey {
    const BRANCHES: usize = 256;

    // Shards by the highest bits, so that shard order is key order. Keys are hashes, hence uniform.
    fn shard(&self) -> usize {
        (self.0 >> 50) as usize
    }
}
