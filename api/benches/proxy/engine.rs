//! The engine, and the thread that only copies bytes to it.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{MeasuredThread, listen, listening};

/// Number of events in a streamed response.
const EVENTS: usize = 32;

pub(super) fn spawn_engine() -> SocketAddr {
    listening(|tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        loop {
            let (stream, _) = listener.accept().await.expect("it listens");
            tokio::spawn(engine_connection(stream));
        }
    })
    .address
}

/// Answers every request with the same document or stream.
async fn engine_connection(mut stream: TcpStream) {
    stream.set_nodelay(true).expect("a socket option");
    let text = "x".repeat(400);
    let document = format!(
        "{{\"id\":\"c\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}}}}],\
         \"usage\":{{\"prompt_tokens\":300,\"completion_tokens\":100,\"total_tokens\":400}},\"z\":\"END\"}}"
    );
    let document = format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{document}",
        document.len()
    );
    let mut buffer = vec![0; 128 * 1024];
    let mut got = 0;
    loop {
        let Ok(length @ 1..) = stream.read(&mut buffer[got..]).await else {
            return;
        };
        got += length;
        let Some(head) = buffer[..got]
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
        else {
            continue;
        };
        let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
        let length = text
            .split("content-length: ")
            .nth(1)
            .and_then(|rest| rest.split('\r').next());
        let length: usize = length
            .and_then(|length| length.parse().ok())
            .expect("a length");
        if got < head + 4 + length {
            continue;
        }
        let is_streaming = buffer[head..got]
            .windows(13)
            .any(|window| window == b"\"stream\":true");
        got = 0;
        if is_streaming {
            stream_answer(&mut stream).await;
        } else if stream.write_all(document.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn stream_answer(stream: &mut TcpStream) {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream
        .write_all(head.as_bytes())
        .await
        .expect("the proxy reads");
    for number in 0..EVENTS {
        let event = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1763630000,\
             \"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" token\"}},\"logprobs\":null,\
             \"finish_reason\":null}}],\"usage\":{{\"prompt_tokens\":300,\"total_tokens\":400,\"completion_tokens\":{number}}}}}\n\n"
        );
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        stream
            .write_all(chunk.as_bytes())
            .await
            .expect("the proxy reads");
        // A real engine sends its events one by one.
        tokio::task::yield_now().await;
    }
    let last = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    stream
        .write_all(last.as_bytes())
        .await
        .expect("the proxy reads");
}

pub(super) fn spawn_pump(engine: SocketAddr) -> MeasuredThread {
    listening(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        loop {
            let (mut client, _) = listener.accept().await.expect("it listens");
            tokio::spawn(async move {
                client.set_nodelay(true).expect("a socket option");
                let mut engine = TcpStream::connect(engine)
                    .await
                    .expect("the engine listens");
                engine.set_nodelay(true).expect("a socket option");
                // The task ends when the client does.
                drop(tokio::io::copy_bidirectional(&mut client, &mut engine).await);
            });
        }
    })
}
