#!/usr/bin/env python3
"""An engine that streams `max_tokens` events, each in a separate write, to all open streams in
turn: `stream_engine.py STEP_MS PORT...`.

In each step, every stream gets one event, as from an engine that decodes in batches. With a step of
0, events are written as fast as possible. `/events` returns the number of events written so far.
"""

import asyncio
import re
import sys

from subjects import ANSWER

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"yes"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNK = chunk(EVENT)
LAST = chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"


def fixed_answer(path):
    """Returns the response to a request that is not for a stream."""
    kind, status, text = "application/json", "200 OK", ANSWER
    if path == b"/v1/models":
        text = '{"object":"list","data":[{"id":"m","object":"model"}]}'
    elif path == b"/metrics":
        kind, text = "text/plain", "vllm:num_requests_running 0\n"
    elif path == b"/health":
        text = ""
    elif path == b"/events":
        kind, text = "text/plain", str(Steps.written)
    elif not path.startswith(b"/v1/chat"):
        status, text = "404 Not Found", ""
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Steps:
    """Writes one event per step to each open stream."""

    written = 0

    def __init__(self, pause):
        self.pause = pause
        self.left = {}
        self.wake = asyncio.Event()

    def open(self, connection, events):
        connection.transport.write(HEAD)
        self.left[connection] = events
        self.wake.set()

    def close(self, connection):
        self.left.pop(connection, None)

    async def run(self):
        loop = asyncio.get_running_loop()
        while True:
            await self.wake.wait()
            next_at = loop.time() + self.pause
            for connection in list(self.left):
                self.step(connection)
            if not self.left:
                self.wake.clear()
            await asyncio.sleep(max(0, next_at - loop.time()))

    def step(self, connection):
        left = self.left[connection]
        Steps.written += 1
        if left > 1:
            self.left[connection] = left - 1
            connection.transport.write(CHUNK)
        else:
            del self.left[connection]
            connection.transport.write(LAST)


class Connection(asyncio.Protocol):
    def __init__(self, steps):
        self.steps, self.read = steps, b""

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, _error):
        self.steps.close(self)

    def data_received(self, data):
        self.read += data
        head, end, rest = self.read.partition(b"\r\n\r\n")
        if not end:
            return
        if b"chunked" in head.lower():
            length = rest.find(b"\r\n0\r\n\r\n") + 7
            if length < 7:
                return
        else:
            told = re.search(rb"(?i)content-length: *(\d+)", head)
            length = int(told.group(1)) if told else 0
        if len(rest) >= length:
            self.read = rest[length:]
            self.answer(head.split(b" ", 2)[1], rest[:length])

    def answer(self, path, body):
        tokens = re.search(rb'"max_tokens": *(\d+)', body)
        if re.search(rb'"stream": *true', body) and tokens:
            self.steps.open(self, int(tokens.group(1)))
        else:
            self.transport.write(fixed_answer(path))


async def main(pause_ms, ports):
    steps = Steps(pause_ms / 1000)
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Connection(steps), "127.0.0.1", port, backlog=1024)
    await steps.run()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
