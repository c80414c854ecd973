"""What the two ways in share: conversations continue through either, charges are the engines' reports, and clients
that leave leave nothing behind."""

import json
import socket

from http1 import TIMEOUT_S, ask, request_bytes
from stand import GATEWAY, check

CONVERSATIONS, TURNS, HANG_UPS = 12, 4, 10
USER = "halves"


def turn(address, messages, index):
    """Sends a turn; the answer's message, its usage, its engine, and the log index at which its prompt is known."""
    headers = {"content-type": "application/json", "x-quorate-user": USER, "x-quorate-min-index": index}
    body = {"model": "emulated", "max_tokens": 16, "messages": messages}
    answer = ask(address, "POST", "/v1/chat/completions", headers, json.dumps(body).encode())
    check(answer.status == 200, answer)
    told = json.loads(answer.body)
    headers = answer.headers
    check("x-quorate-index" in headers, f"no x-quorate-index at {address}: {headers}")
    return told["choices"][0]["message"], told["usage"], headers["x-quorate-backend"], headers["x-quorate-index"]


def halves(stand, address):
    """Conversations whose turns come through the gateway and through data ports, one after the other."""
    ways = [address, stand.replicas[0][0], address, stand.replicas[2][0]]
    moved, cached, charged = [], 0, {"input_uncached": 0, "input_cached": 0, "output": 0}
    for nth in range(CONVERSATIONS):
        # So long that to compute it elsewhere costs more than to wait.
        messages, index, engines = [{"role": "system", "content": f"Conversation {nth}. " + "Be brief. " * 1000}], 0, []
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"Turn {number}: " + "and then? " * 30})
            message, usage, engine, index = turn(ways[(nth + number) % len(ways)], messages, index)
            messages.append({"role": message["role"], "content": message["content"]})
            engines.append(engine)
            found = usage["prompt_tokens_details"]["cached_tokens"]
            cached += found if number else 0
            charged["input_cached"] += found
            charged["input_uncached"] += usage["prompt_tokens"] - found
            charged["output"] += usage["completion_tokens"]
        if len(set(engines)) > 1:
            moved.append(engines)
    check(not moved, f"{len(moved)} of {CONVERSATIONS} conversations changed their engine: {moved[:3]}")
    check(cached, "no engine found a prefix in its cache")
    stand.wait_quiet()
    for number in stand.running():

        def total(number=number):
            return stand.admin(number, f"/admin/v1/users/{USER}")["total"]

        def is_charged():
            return total() == {**charged, "requests": CONVERSATIONS * TURNS}

        stand.until(f"replica {number} has charged {charged}", is_charged)
    print(f"conversations: {CONVERSATIONS} of {TURNS} turns by both ways stay at their engines; charges are exact")


def hang_ups(stand, address):
    """Clients that leave in mid-stream."""
    body = {
        "model": "emulated",
        "max_tokens": 4000,
        "stream": True,
        "messages": [{"role": "user", "content": "Go on."}],
    }
    data = request_bytes(
        "POST", "/v1/chat/completions", {"content-type": "application/json"}, json.dumps(body).encode()
    )
    host, port = address.split(":")
    for _ in range(HANG_UPS):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stream:
            stream.sendall(data)
            received = b""
            while received.count(b"data: ") < 3:
                piece = stream.recv(65536)
                check(piece, f"the stream ended: {received[-300:]}")
                received += piece
    # The streams would take more than a minute.
    stand.wait_quiet()
    print(f"hang-ups: {HANG_UPS} clients that left in mid-stream left nothing behind")


def run(stand, _):
    config, port = stand.example(GATEWAY)
    stand.start_envoy("envoy-shared", config)
    halves(stand, f"127.0.0.1:{port}")
    hang_ups(stand, f"127.0.0.1:{port}")
