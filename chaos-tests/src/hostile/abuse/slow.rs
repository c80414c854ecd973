//! Clients that hold resources for long: slow heads, handshakes and bodies, unread responses, and
//! connections beyond the limit.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::context::{ATTACKER, AbuseContext, FROM, PATIENCE};
use crate::hostile::client;
use crate::processes::access::{ClientAccess, key};

/// Number of slow connections to each replica.
const SLOW: usize = 40;
/// Pause between two bytes in a phase with a total timeout. `DRIP_OF_BODY` applies to bodies, which
/// have an idle timeout.
const DRIP: Duration = Duration::from_millis(200);
const DRIP_OF_BODY: Duration = Duration::from_secs(1);
/// Maximum time that a slow connection may stay open.
const BORNE: Duration = Duration::from_secs(45);
/// Number of unread responses per replica.
const UNREAD: usize = 8;
/// Number of handshakes with each replica, and how many of them run concurrently.
const HANDSHAKES: (usize, usize) = (150, 16);
/// Number of connections to each replica, which exceeds its limit.
pub(super) const CROWD: usize = 400;

/// Sends `begin` and then one byte at a time until the other side closes. Returns its response.
async fn send_slowly<S: AsyncRead + AsyncWrite>(
    stream: S,
    begin: Vec<u8>,
    (drop, pause): (u8, Duration),
) -> anyhow::Result<String> {
    let (mut read, mut write) = split(stream);
    let dripping = async {
        write.write_all(&begin).await?;
        loop {
            write.write_all(&[drop]).await?;
            write.flush().await?;
            sleep(pause).await;
        }
    };
    let said = async {
        let mut said = Vec::new();
        // A reset also ends the connection.
        let _ = read.read_to_end(&mut said).await;
        said
    };
    let ended = timeout(BORNE, async {
        tokio::pin!(said, dripping);
        tokio::select! {
            biased;
            said = &mut said => said,
            // The read end reports the failure.
            _broken = &mut dripping => { let _: std::io::Result<()> = _broken; said.await }
        }
    });
    let said = ended.await.context("it was borne with to the end")?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Sends data slowly on many connections at once. Each must be closed with one of `statuses` or
/// with none.
async fn drips(
    context: &AbuseContext,
    access: &ClientAccess,
    (begin, drop): (Vec<u8>, (u8, Duration)),
    statuses: &[&str],
) -> anyhow::Result<()> {
    let mut all = JoinSet::new();
    for to in &context.data {
        for _ in 0..SLOW * context.scale {
            let (to, begin, access) = (*to, begin.clone(), access.clone());
            all.spawn(async move {
                let socket = client::connect(FROM.into(), to).await?;
                let secured = timeout(PATIENCE, access.secure(socket, to)).await;
                match secured.context("no handshake in time")? {
                    Ok(stream) => send_slowly(stream, begin, drop).await,
                    Err(_) => Ok(String::new()),
                }
            });
        }
    }
    while let Some(ended) = all.join_next().await {
        let said = ended??;
        let status = said.split(' ').nth(1).unwrap_or_default();
        let is_expected = said.is_empty() || statuses.contains(&status);
        ensure!(is_expected, "answered {said:?}");
        context.count(if said.is_empty() { "closed" } else { status });
    }
    Ok(())
}

/// Sends request heads one byte at a time, which must end with status 408.
pub(super) async fn heads(context: &AbuseContext) -> anyhow::Result<()> {
    let begin = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ".to_vec();
    drips(context, &context.access, (begin, (b'a', DRIP)), &["408"]).await
}

/// Sends request bodies one byte at a time, with a valid API key.
pub(super) async fn bodies(context: &AbuseContext) -> anyhow::Result<()> {
    let begin = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: 100000\r\n\r\n{{",
        key(ATTACKER)
    );
    let drop = (begin.into_bytes(), (b' ', DRIP_OF_BODY));
    drips(context, &context.access, drop, &["408"]).await
}

/// Sends the beginning of TLS handshakes one byte at a time. Without TLS, it is not valid HTTP.
pub(super) async fn hellos(context: &AbuseContext) -> anyhow::Result<()> {
    // A record of 512 bytes with a ClientHello of 508.
    let begin = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec();
    let clear = ClientAccess::default();
    drips(context, &clear, (begin, (0, DRIP)), &["400"]).await
}

/// Opens streams and reads nothing of their responses, until the router must have closed them.
pub(super) async fn readers(context: &AbuseContext) -> anyhow::Result<()> {
    let mut unread = Vec::new();
    for replica in 0..context.data.len() {
        for number in 0..UNREAD * context.scale {
            let id = format!("fat.{number}");
            let asked = context.ask(replica, &id, true);
            let head = timeout(PATIENCE, asked).await.context("no answer")?;
            let head = head.map_err(anyhow::Error::msg)?;
            context.count(head.status.as_str());
            if head.status == StatusCode::OK {
                unread.push(head);
            }
        }
    }
    // The router disconnects a client that reads nothing. The sockets still hold part of the
    // response.
    sleep(2 * super::UNTAKEN).await;
    for mut head in unread {
        let read = timeout(BORNE, async {
            while let Ok(Some(_)) = head.piece().await {}
        });
        read.await.context("an unread answer was kept")?;
    }
    Ok(())
}

/// Performs TLS handshakes one after another, without a request. Breaks off every other one.
pub(super) async fn handshakes(context: &AbuseContext) -> anyhow::Result<()> {
    let (count, at_once) = HANDSHAKES;
    let mut all = JoinSet::new();
    for to in &context.data {
        for _ in 0..at_once {
            let (to, access) = (*to, context.access.clone());
            let count = count * context.scale / at_once;
            all.spawn(async move {
                let mut done = 0;
                for _ in 0..count {
                    let socket = client::connect(FROM.into(), to).await?;
                    // Every other client leaves in the middle.
                    let limit = Duration::from_millis(if done % 2 == 0 { 5000 } else { 1 });
                    let _ = timeout(limit, access.secure(socket, to)).await;
                    done += 1;
                }
                anyhow::Ok(done)
            });
        }
    }
    while let Some(ended) = all.join_next().await {
        for _ in 0..ended?? {
            context.count("begun");
        }
    }
    Ok(())
}

/// Opens more connections than the limit, from one address and then from many.
pub(super) async fn crowd(context: &AbuseContext) -> anyhow::Result<()> {
    for addresses in [1_u8, 8] {
        let mut held = Vec::new();
        for to in &context.data {
            for number in 0..CROWD {
                let last = u8::try_from(number % usize::from(addresses)).unwrap_or(0);
                let from = Ipv4Addr::new(127, 0, 10, 1 + last);
                match client::connect(from.into(), *to).await {
                    Ok(socket) => held.push(socket),
                    Err(_) => context.count("not connected"),
                }
            }
        }
        let mut open = 0;
        for socket in &mut held {
            // A connection that was refused or evicted reads its end.
            let mut said = [0; 64];
            let read = timeout(Duration::from_millis(1), socket.read(&mut said));
            open += usize::from(read.await.is_err());
        }
        let room = super::CONNECTIONS_MAX * context.data.len();
        ensure!(open <= room, "{open} are open, {room} fit");
        context.count(format!("{open} held from {addresses} addresses"));
    }
    Ok(())
}
