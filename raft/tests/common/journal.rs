//! A machine that remembers every command. The unit tests of the crate use it too.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use raft::{CheckCommand, FrozenMachine, SnapshotError, StateMachine, StopReplicaError};

/// Commands by log index. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<BTreeMap<u64, Vec<u8>>>>);

struct Frozen(BTreeMap<u64, Vec<u8>>);

impl Journal {
    pub fn commands(&self) -> BTreeMap<u64, Vec<u8>> {
        self.0.lock().unwrap().clone()
    }

    pub fn contains(&self, command: &[u8]) -> bool {
        self.0
            .lock()
            .unwrap()
            .values()
            .any(|known| known == command)
    }

    /// Forgets the command at `index`, so that the state contradicts the log.
    pub fn spoil(&self, index: u64) {
        self.0.lock().unwrap().remove(&index);
    }
}

impl StateMachine for Journal {
    fn check(&self) -> CheckCommand {
        Arc::new(|command, _, _| match command {
            b"garbage" => Err("garbage is no command".to_owned()),
            _ => Ok(()),
        })
    }

    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError> {
        if command == b"poison" {
            return Err(StopReplicaError("cannot decode".to_owned()));
        }
        let before = self.0.lock().unwrap().insert(index, command.to_vec());
        assert_eq!(before, None, "index {index} applied twice");
        Ok([b"ok ", command].concat())
    }

    fn skip(&mut self, _index: u64) {}

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(Frozen(self.commands()))
    }

    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError> {
        let corrupt = |error: std::io::Error| SnapshotError(error.to_string());
        let mut bytes = Vec::new();
        snapshot.read_to_end(&mut bytes).map_err(corrupt)?;
        let mut rest = &bytes[..];
        let mut commands = BTreeMap::new();
        while !rest.is_empty() {
            let mut number = [0; 8];
            rest.read_exact(&mut number).map_err(corrupt)?;
            let index = u64::from_le_bytes(number);
            rest.read_exact(&mut number).map_err(corrupt)?;
            let mut command = vec![0; u64::from_le_bytes(number) as usize];
            rest.read_exact(&mut command).map_err(corrupt)?;
            commands.insert(index, command);
        }
        *self.0.lock().unwrap() = commands;
        Ok(())
    }
}

impl FrozenMachine for Frozen {
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        for (index, command) in &self.0 {
            out.write_all(&index.to_le_bytes())?;
            out.write_all(&(command.len() as u64).to_le_bytes())?;
            out.write_all(command)?;
        }
        Ok(())
    }
}
