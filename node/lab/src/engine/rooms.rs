//! Disaggregated prefill and decode as in SGLang: bootstrap rooms that pair the two engines of a
//! request.
//!
//! Both engines get a request with the prefill engine's bootstrap address and a room number. The
//! decode engine connects to that address and sends the number. The prefill engine then computes
//! the prompt, waits as long as the transfer would take, reports completion, and responds to its
//! own request. An engine that aborts closes the connection, which also ends the other engine's
//! request. An engine that waits in vain gives up after [`RoomOptions::patience`]. No blocks are
//! transferred: only time is modelled.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::driver::{DriverCore, LatestProgress};
use super::model::ComputeJob;
use super::rejection::{RequestRejection, read};
use super::transfer::TransferOptions;

/// Maximum number of rooms per engine in which one side waits.
const ROOMS_MAX: usize = 4096;
/// Maximum length of a line with a room number, including the line break, in bytes.
const LINE_BYTES_MAX: u64 = 32;
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Line that a prefill engine sends after the transfer.
const DONE: &[u8] = b"ok\n";

/// Stage that an engine computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RoomMode {
    /// Compute only prompts.
    Prefill,
    /// Compute only responses.
    Decode,
}

impl RoomMode {
    /// Returns SGLang's name of the mode.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Options of an engine that uses rooms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoomOptions {
    /// Stage that the engine computes.
    pub mode: RoomMode,
    /// Bootstrap address of a prefill engine. Port 0 selects a free port.
    pub bootstrap: SocketAddr,
    /// Durations and failures of transfers.
    pub transfer: TransferOptions,
    /// Maximum time for which a prefill engine waits for the decode engine, and a decode engine for
    /// the transferred prompt.
    pub patience: Duration,
}

impl RoomOptions {
    /// Returns options for an engine in mode `mode`, with SGLang's timeout and a free port.
    #[must_use]
    pub fn of(mode: RoomMode) -> Self {
        Self {
            mode,
            bootstrap: SocketAddr::from(([127, 0, 0, 1], 0)),
            transfer: TransferOptions::default(),
            patience: Duration::from_secs(300),
        }
    }
}

/// Fields of a request that name the room and its bootstrap address.
#[derive(Debug, Deserialize)]
pub(super) struct RoomAddress {
    #[serde(default)]
    bootstrap_host: Option<OneOrList<String>>,
    #[serde(default)]
    bootstrap_port: Option<OneOrList<u16>>,
    #[serde(default)]
    bootstrap_room: Option<OneOrList<u64>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrList<T> {
    One(T),
    List(Vec<T>),
}

impl<T: Clone> OneOrList<T> {
    /// Returns the value if there is exactly one, as the engine supports one choice of one prompt.
    fn only(&self) -> Option<&T> {
        match self {
            Self::One(only) => Some(only),
            Self::List(list) => match &list[..] {
                [only] => Some(only),
                _ => None,
            },
        }
    }
}

/// Number and address of a room.
#[derive(Debug)]
pub(super) struct Room {
    host: String,
    port: u16,
    number: u64,
}

/// The side that waits in a room for the other engine.
#[derive(Debug)]
enum WaitingSide {
    /// The prefill request, which computes the prompt once a decode engine joins.
    Prefill(oneshot::Sender<TcpStream>),
    /// The connection of a decode engine, which waits for the blocks.
    Decode(TcpStream),
}

type WaitingRooms = Arc<Mutex<HashMap<u64, WaitingSide>>>;

/// Rooms of an engine, with the sides that wait in them.
#[derive(Debug)]
pub(super) struct EngineRooms {
    options: RoomOptions,
    /// Bootstrap address that the engine listens on, if it is a prefill engine.
    address: SocketAddr,
    speed: f64,
    waiting: WaitingRooms,
    transfers: AtomicU64,
}

/// A room in which a prefill request waits. Dropping it abandons the room.
struct OpenRoom<'a> {
    rooms: &'a EngineRooms,
    number: u64,
    joined: oneshot::Receiver<TcpStream>,
}

impl Drop for OpenRoom<'_> {
    fn drop(&mut self) {
        lock(&self.rooms.waiting).remove(&self.number);
    }
}

impl EngineRooms {
    /// Creates the rooms of an engine. A prefill engine listens on its bootstrap port.
    pub(super) async fn start(
        options: RoomOptions,
        speed: f64,
        (stop, tasks): (&CancellationToken, &TaskTracker),
    ) -> io::Result<Self> {
        let waiting = WaitingRooms::default();
        let mut address = options.bootstrap;
        if options.mode == RoomMode::Prefill {
            let listener = TcpListener::bind(options.bootstrap).await?;
            address = listener.local_addr()?;
            let doors = admit(listener, Arc::clone(&waiting), options.patience);
            tasks.spawn(stop.clone().run_until_cancelled_owned(doors));
        }
        Ok(Self {
            options,
            address,
            speed,
            waiting,
            transfers: AtomicU64::new(0),
        })
    }

    pub(super) fn mode(&self) -> RoomMode {
        self.options.mode
    }

    /// Returns the bootstrap address.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the room that a request names.
    ///
    /// # Errors
    /// With SGLang's error message, if the request names none.
    pub(super) fn of(body: &[u8]) -> Result<Room, RequestRejection> {
        let told: RoomAddress = read(body, None)?;
        let number = told.bootstrap_room.as_ref().and_then(OneOrList::only);
        let host = told.bootstrap_host.as_ref().and_then(OneOrList::only);
        let port = told.bootstrap_port.as_ref().and_then(OneOrList::only);
        match (number, host, port) {
            (Some(number), Some(host), Some(port)) => Ok(Room {
                host: host.clone(),
                port: *port,
                number: *number,
            }),
            _ => Err(RequestRejection::bad_request(
                "Invalid request: Disaggregated request received without bootstrap room id.",
                None,
            )),
        }
    }

    /// Waits for the decode engine in the room, computes the prompt, and hands it over.
    ///
    /// # Errors
    /// If the room is taken, there are too many rooms, no decode engine joins in time, it
    /// disconnects, or the transfer fails.
    pub(super) async fn compute(
        &self,
        core: &Arc<DriverCore>,
        job: ComputeJob,
        room: &Room,
    ) -> Result<LatestProgress, RequestRejection> {
        let tokens = job.sequence.prompt_tokens();
        let mut open = self.open(room.number)?;
        let joined = timeout(self.options.patience, &mut open.joined);
        let mut peer = match joined.await {
            Ok(Ok(peer)) => peer,
            Ok(Err(_)) | Err(_) => return Err(failed("timed out in KVPoll.Bootstrapping")),
        };
        let ticket = core.submit(job);
        let end = tokio::select! {
            biased;
            () = is_left(&mut peer) => return Err(failed("the decode instance could be dead")),
            end = ticket.finished() => end,
        };
        let number = self.transfers.fetch_add(1, Ordering::Relaxed) + 1;
        let TransferOptions {
            base,
            tokens_per_s,
            lost_every,
            ..
        } = self.options.transfer;
        if lost_every > 0 && number.is_multiple_of(u64::from(lost_every)) {
            return Err(failed("KVTransferError: the transfer was lost"));
        }
        let time = base.as_secs_f64() + f64::from(tokens) / f64::from(tokens_per_s.max(1));
        tokio::time::sleep(Duration::from_secs_f64(time / self.speed)).await;
        match peer.write_all(DONE).await {
            Ok(()) => Ok(end),
            Err(_) => Err(failed("the decode instance could be dead")),
        }
    }

    /// Joins the room at the prefill engine, and waits until the prompt is computed and
    /// transferred.
    ///
    /// # Errors
    /// If the prefill engine cannot be reached, fails, or takes longer than
    /// [`RoomOptions::patience`].
    pub(super) async fn fetch(&self, room: &Room) -> Result<(), RequestRejection> {
        let fetched = async {
            let host = room.host.trim_start_matches('[').trim_end_matches(']');
            let mut peer = TcpStream::connect((host, room.port)).await?;
            peer.write_all(format!("{}\n", room.number).as_bytes())
                .await?;
            let mut said = Vec::new();
            peer.take(LINE_BYTES_MAX).read_to_end(&mut said).await?;
            io::Result::Ok(said == DONE)
        };
        match timeout(self.options.patience, fetched).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err(failed("the prefill instance could be dead")),
            Ok(Err(error)) => Err(failed(&format!("could not fetch: {error}"))),
            Err(_) => Err(failed("timed out in KVPoll.WaitingForInput")),
        }
    }

    fn open(&self, number: u64) -> Result<OpenRoom<'_>, RequestRejection> {
        let (tell, joined) = oneshot::channel();
        let mut waiting = lock(&self.waiting);
        match waiting.remove(&number) {
            Some(WaitingSide::Decode(peer)) => drop(tell.send(peer)),
            Some(other @ WaitingSide::Prefill(_)) => {
                waiting.insert(number, other);
                return Err(failed("the room is taken"));
            }
            None if waiting.len() >= ROOMS_MAX => return Err(failed("too many rooms")),
            None => {
                waiting.insert(number, WaitingSide::Prefill(tell));
            }
        }
        drop(waiting);
        Ok(OpenRoom {
            rooms: self,
            number,
            joined,
        })
    }
}

/// Accepts connections of decode engines and lets each join the room that it names.
async fn admit(listener: TcpListener, waiting: WaitingRooms, patience: Duration) {
    let comers = TaskTracker::new();
    loop {
        let Ok((peer, _)) = listener.accept().await else {
            // Too few descriptors, or a connection that was closed at once.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let waiting = Arc::clone(&waiting);
        comers.spawn(async move {
            // Only a connection that waits in a room needs a timeout.
            let Ok(Ok(Some(number))) = timeout(patience, join(peer, &waiting)).await else {
                return;
            };
            tokio::time::sleep(patience).await;
            let mut waiting = lock(&waiting);
            if let Some(WaitingSide::Decode(_)) = waiting.get(&number) {
                waiting.remove(&number);
            }
        });
    }
}

/// Reads a room number from `peer` and hands `peer` to the prefill request that waits in the room.
/// Returns the number if `peer` has to wait there instead.
async fn join(mut peer: TcpStream, waiting: &WaitingRooms) -> io::Result<Option<u64>> {
    let mut line = String::new();
    let mut reader = BufReader::new((&mut peer).take(LINE_BYTES_MAX));
    reader.read_line(&mut line).await?;
    let Ok(number) = line.trim_end().parse::<u64>() else {
        return Ok(None);
    };
    let mut waiting = lock(waiting);
    match waiting.remove(&number) {
        Some(WaitingSide::Prefill(tell)) => drop(tell.send(peer)),
        // Another engine came first.
        Some(other @ WaitingSide::Decode(_)) => {
            waiting.insert(number, other);
        }
        None if waiting.len() < ROOMS_MAX => {
            waiting.insert(number, WaitingSide::Decode(peer));
            return Ok(Some(number));
        }
        None => {}
    }
    Ok(None)
}

/// Waits until the other side closes the connection.
async fn is_left(peer: &mut TcpStream) {
    let mut said = [0; 1];
    while peer.read(&mut said).await.is_ok_and(|length| length > 0) {}
}

fn lock(rooms: &WaitingRooms) -> MutexGuard<'_, HashMap<u64, WaitingSide>> {
    rooms.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(why: &str) -> RequestRejection {
    RequestRejection {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        message: format!("KV transfer failed: {why}"),
        param: None,
    }
}
