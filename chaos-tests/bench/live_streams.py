#!/usr/bin/env python3
"""Breaks streams of real engines in the middle, and compares what clients get with undisturbed answers.

Needs two equal engines that run already, with greedy sampling that is deterministic, and a binary of Quorate:

    live_streams.py --model tiny --words words.json --engine 127.0.0.1:8150 --engine 127.0.0.1:8151 [--kill PID]

A relay before each engine counts the events of a stream, and resets the connection in the middle. `--kill`
instead ends the process group of the engine that has the last stream with SIGKILL: PID is that of the first
engine, and `--kill` comes once for each engine. `words.json` lists ids of tokens that are never merged with each
other: answers consist of them, because a text of a random model is otherwise seldom tokenized as it was generated.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import signal
import socket
import struct
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "race"))
from programs import Process, free_ports  # noqa: E402
from subjects import BACKEND, QUORATE, wait_for_leader  # noqa: E402

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


class Relay:
    """A relay before an engine, which may reset the connection of a stream after some events."""

    def __init__(self, host, port, breaker):
        self.host, self.port, self.breaker = host, port, breaker

    async def serve(self, reader, writer):
        try:
            above = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self.pass_up(reader, above[1]), self.pass_down(above[0], writer))
        except asyncio.CancelledError:
            # The trial is over.
            pass

    async def pass_up(self, reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def pass_down(self, reader, writer):
        try:
            while data := await reader.read(65536):
                events = data.count(b"data: ")
                writer.write(data)
                await writer.drain()
                if self.breaker.breaks(self, events):
                    # Linger for no time: the connection is reset.
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    break
        except OSError:
            pass
        writer.close()


class Breaker:
    """Breaks one stream after a number of events."""

    def __init__(self, kills):
        self.events, self.action, self.kills, self.broken = None, None, kills, 0

    def arm(self, events, is_kill=False):
        self.events, self.is_kill = events, is_kill

    def breaks(self, relay, events):
        if self.events is None or not events:
            return False
        self.events -= events
        if self.events > 0:
            return False
        self.events = None
        self.broken += 1
        if self.is_kill:
            os.killpg(self.kills[relay.port], signal.SIGKILL)
            return False
        return True


def request(args, words, path, number):
    """The body of a request, whose answer consists of words."""
    text = f"Number {number}: tell me about replicas, leaders and logs."
    body = {
        "model": args.model,
        "max_tokens": args.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if words:
        body["logit_bias"] = {str(word): 100 for word in words}
    if path == "/v1/completions":
        return {**body, "prompt": text}
    return {**body, "messages": [{"role": "user", "content": text}]}


def ask(url, body):
    data = json.dumps(body).encode()
    sent = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(sent, timeout=300) as answer:
        return answer.read().decode()


def text_of(choice):
    for part in (choice.get("delta"), choice.get("message")):
        if part:
            return part.get("content") or ""
    return choice.get("text") or ""


def read_stream(body):
    """Text, ids, finish reasons, usage and errors of a stream."""
    chunks = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    is_done = bool(chunks) and chunks[-1] == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {
        "text": "".join(text_of(choice) for choice in choices),
        "ids": {chunk["id"] for chunk in chunks if "id" in chunk},
        "finish": [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        "usage": usage[-1] if usage else None,
        "errors": [chunk["error"] for chunk in chunks if "error" in chunk],
        "is_done": is_done,
    }


def compare(whole, stream):
    """What differs from the undisturbed answer."""
    if stream["errors"]:
        return [f"error {stream['errors'][0]['message']}"]
    choice, found = whole["choices"][0], []
    if stream["text"] != text_of(choice):
        same = os.path.commonprefix([stream["text"], text_of(choice)])
        found.append(f"text from byte {len(same)} of {len(text_of(choice))} on")
    if stream["finish"] != [choice["finish_reason"]]:
        found.append(f"finish {stream['finish']}")
    if len(stream["ids"]) != 1 or not stream["is_done"]:
        found.append(f"frame {len(stream['ids'])} ids, done {stream['is_done']}")
    counts = ("prompt_tokens", "completion_tokens")
    one, other = ([usage[count] for count in counts] for usage in (stream["usage"], whole["usage"]))
    if one != other:
        found.append(f"usage {one}, not {other}")
    return found


async def run(args):
    words = json.loads(pathlib.Path(args.words).read_text())[:200] if args.words else []
    engines = [(host, int(port)) for host, port in (it.rsplit(":", 1) for it in args.engine)]
    breaker = Breaker(dict(zip((port for _, port in engines), args.kill)))
    ports = free_ports(len(engines) + 3)
    *relayed, data, admin, peer = ports
    for (host, port), at in zip(engines, relayed):
        await asyncio.start_server(Relay(host, port, breaker).serve, "127.0.0.1", at)
    with tempfile.TemporaryDirectory(prefix="quorate-live-") as folder:
        folder = pathlib.Path(folder)
        text = QUORATE.format(id=1, folder=folder, data=data, admin=admin, peer=peer,
                              peers=f'"127.0.0.1:{peer}"', replicas=1)  # fmt: skip
        text += "".join(BACKEND.format(number=n + 1, port=port) for n, port in enumerate(relayed))
        (folder / "quorate.toml").write_text(text)
        replica = Process(folder, "replica", "0-1", [args.quorate, "serve", "--config", folder / "quorate.toml"])
        try:
            await asyncio.to_thread(wait_for_leader, [admin])
            await trial(args, words, engines, breaker, data)
            metrics = await asyncio.to_thread(ask_get, f"http://127.0.0.1:{admin}/metrics")
            counted = [it for it in metrics.splitlines() if it.startswith("quorate_proxy_streams_broken_total{")]
            print(*(it for it in counted if not it.endswith(" 0")), sep="\n")
        finally:
            replica.stop()


def ask_get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


async def trial(args, words, engines, breaker, data):
    rng = random.Random(args.seed)
    differ = 0
    for number in range(args.streams):
        path = ENDPOINTS[number % 2]
        is_kill = bool(args.kill) and number == args.streams - 1
        body = request(args, words, path, number)
        direct = f"http://{engines[0][0]}:{engines[0][1]}{path}"
        whole = json.loads(await asyncio.to_thread(ask, direct, body))
        breaker.arm(rng.randint(2, args.tokens - 5), is_kill)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.monotonic()
        stream = read_stream(await asyncio.to_thread(ask, f"http://127.0.0.1:{data}{path}", streamed))
        found = compare(whole, stream)
        differ += bool(found)
        how = "killed" if is_kill else "reset"
        print(f"{number}: {path}, {how}, {time.monotonic() - began:.1f} s: {'; '.join(found) or 'equal'}", flush=True)
        # Two requests that break an engine are refused by design, and a circuit closes again.
        await asyncio.sleep(args.pause)
    print(f"{args.streams} streams, {breaker.broken} broken, {differ} differ; the last text: {stream['text']!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parents[2]
    parser.add_argument("--quorate", default=root / "target/release/quorate", help="the program [%(default)s]")
    parser.add_argument("--engine", action="append", required=True, help="address of an engine; twice")
    parser.add_argument("--kill", action="append", type=int, default=[], help="process group of an engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--words", help="file with ids of the tokens that answers consist of")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two streams [%(default)s]")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
