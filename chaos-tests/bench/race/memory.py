#!/usr/bin/env python3
"""Measures the memory of a replica: resident bytes per idle client connection, open stream, waiting
request, user and backend.

The replica has the default config except for limits and places, the engines are in Python, and
prompts have 1 KB. Each row uses a new replica, which answers 12,000 requests before the first
measurement, to fill what it keeps about recent requests. Needs two cores.
"""

import argparse
import asyncio
import json
import pathlib
import resource
import sys
import tempfile
import urllib.request

from programs import SUBJECT_CORE, Process, free_ports, get
from stream_engine import EVENT, fixed_answer
from subjects import BACKEND, QUORATE, wait_for_leader

WARM_REQUESTS = 12_000
CONNECTIONS = 16
PROMPT = "All prompts of this measurement begin alike. " * 22
# Limits that admit all connections and requests of a row, half of which one user may have.
ROOM = """
[limits]
max_connections = 32768
max_requests = 65536
"""
RESUME_OFF = """
[streams]
resume = "off"
"""
FEW_PLACES = """
[admission]
concurrency = 8
max_queue = 65535
max_wait = "1day"
codel_target = "1day"
"""


class Engine:
    """An engine that responds immediately. A stream gets one event and then stays open."""

    async def serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                path = head.split(b" ", 2)[1]
                if b'"stream":true' in body:
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                        b"transfer-encoding: chunked\r\n\r\n"
                        + b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
                    )
                    await writer.drain()
                    await reader.read(1)
                    return
                writer.write(fixed_answer(path))
                await writer.drain()
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Client:
    """A connection to the replica."""

    def __init__(self, port):
        self.port = port

    async def open(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def send(self, number, user=None, stream=False):
        message = {"role": "user", "content": f"{PROMPT}{number:09}"}
        body = {"model": "m", "max_tokens": 1, "messages": [message]}
        if stream:
            body["stream"] = True
        text = json.dumps(body, separators=(",", ":")).encode()
        of_user = f"x-quorate-user: {user}\r\n" if user else ""
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: replica\r\n"
            f"content-type: application/json\r\n{of_user}content-length: {len(text)}\r\n\r\n"
        )
        self.writer.write(head.encode() + text)
        await self.writer.drain()

    async def head(self):
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode() + (await self.reader.read(500)).decode())
        return head.lower()

    async def ask(self, number, user=None):
        await self.send(number, user)
        head = await self.head()
        await self.reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))


async def ask_all(port, count, user=lambda number: None):
    """Sends `count` requests over a few connections, and waits for the responses."""
    clients = [await Client(port).open() for _ in range(CONNECTIONS)]

    async def some(at):
        for number in range(at, count, CONNECTIONS):
            await clients[at].ask(number, user(number))

    await asyncio.gather(*(some(at) for at in range(CONNECTIONS)))
    for client in clients:
        client.writer.close()


async def idle_connections(replica, count):
    clients = [await Client(replica.port).open() for _ in range(count)]
    for number, client in enumerate(clients):
        await client.ask(number)
    return clients


async def open_streams(replica, count):
    clients = [await Client(replica.port).open() for _ in range(count)]
    for number, client in enumerate(clients):
        await client.send(number, f"user-{number % 64}", stream=True)
        await client.head()
        await client.reader.readuntil(b"\n\n")
    return clients


async def waiting_requests(replica, count):
    held = await open_streams(replica, 2 * 8)
    clients = [await Client(replica.port).open() for _ in range(count)]
    for number, client in enumerate(clients):
        await client.send(number, f"user-{number % 64}")
    await wait_for(lambda: replica.waiting() >= count)
    return held + clients


async def users(replica, count):
    await ask_all(replica.port, count, lambda number: f"user-{number}")


async def backends(replica, count):
    for number in range(count):
        body = {"url": f"http://127.1.{number // 250}.{number % 250 + 1}:9", "models": ["other"]}
        await asyncio.to_thread(replica.put, f"/admin/v1/backends/more-{number}", body)


async def wait_for(holds):
    for _ in range(600):
        if await asyncio.to_thread(holds):
            return
        await asyncio.sleep(0.1)
    sys.exit("it does not come to that within a minute")


class Replica:
    def __init__(self, folder, quorate, engines, more):
        home = folder / "replica"
        home.mkdir()
        data, self.admin, peer = free_ports(3)
        config = home / "quorate.toml"
        text = QUORATE.format(
            id=1,
            folder=home,
            data=data,
            admin=self.admin,
            peer=peer,
            peers=f'"127.0.0.1:{peer}"',
            replicas=1,
        )
        text += "".join(BACKEND.format(number=n + 1, port=port) for n, port in enumerate(engines))
        config.write_text(text + more)
        command = [quorate, "serve", "--config", config]
        self.process = Process(folder, "replica", SUBJECT_CORE, command)
        self.port = data
        try:
            wait_for_leader([self.admin])
        except BaseException:
            self.process.stop()
            raise

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.child.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def put(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def waiting(self):
        told = get(self.admin, "/metrics").splitlines()
        lines = [line for line in told if line.startswith("quorate_admission_waiting ")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def measure(args, name, hold, count, more):
    engine = Engine()
    ports = free_ports(2)
    servers = [
        await asyncio.start_server(engine.serve, "127.0.0.1", port, backlog=4096) for port in ports
    ]
    with tempfile.TemporaryDirectory(prefix="quorate-memory-") as folder:
        replica = await asyncio.to_thread(
            Replica, pathlib.Path(folder), args.quorate, ports, more
        )
        try:
            await ask_all(replica.port, WARM_REQUESTS)
            # Waits for a flush, and for the allocator to return memory.
            await asyncio.sleep(2)
            before = replica.resident()
            held = await hold(replica, count)
            await asyncio.sleep(2)
            after = replica.resident()
            each = (after - before) / count / 1024
            print(f"| {name} | {count:,} | {before >> 20} | {after >> 20} | {each:.1f} |", flush=True)
            for client in held or []:
                client.writer.close()
        finally:
            replica.process.stop()
            for server in servers:
                server.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    root = pathlib.Path(__file__).resolve().parents[3]
    parser.add_argument(
        "--quorate", default=root / "target/release/quorate", help="the program [%(default)s]"
    )
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    print("| what | how many | MiB before | MiB with them | KiB each |")
    print("| --- | --- | --- | --- | --- |")
    for case in (
        ("idle client connection, after a request", idle_connections, 8_000, ROOM),
        ("open stream", open_streams, 8_000, ROOM),
        ("open stream that is not continued", open_streams, 8_000, ROOM + RESUME_OFF),
        ("request that waits for a place", waiting_requests, 8_000, ROOM + FEW_PLACES),
        ("user", users, 50_000, ROOM),
        ("backend that cannot be reached", backends, 1_000, ROOM),
    ):
        asyncio.run(measure(args, *case))


if __name__ == "__main__":
    main()
