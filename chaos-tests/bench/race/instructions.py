"""Instructions that a request takes, counted by valgrind. They depend less than CPU time on how busy
the machine is."""

import http.client
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time

from corpus import UNIQUE, agent_body
from gateway import picker_settings, start_gateway
from loads import AGENT_SIZES, DIFFERENT, SIZES
from programs import Stage, free_ports
from races import table
from subjects import start_engines, start_quorate

IN_SESSION = "1 KB, turns of sessions"
WARM_UP, REQUESTS, IDLE_SECONDS = 50, 400, 8
# An agent's body takes as many instructions as a hundred small ones.
AGENT_SIZE, AGENT_REQUESTS = "220 KB", 60
# A slow disk gathers the items of a request in fewer log entries, and so changes the count.
MEMORY = "/dev/shm"
NUMBERS = itertools.count()
# Sessions whose turns alternate.
SESSIONS = itertools.cycle(f"agent-{number}" for number in range(16))


def instructions(args):
    """Instructions per request in user mode, one request at a time (valgrind's callgrind)."""
    rows = [
        [size, *(f"{figure:,.0f}" for figure in (statistics.median(found), min(found), max(found)))]
        for size, found in counted_instructions(args, with_picker=True).items()
    ]
    table(["instructions a request, less those at rest", "median", "least", "most"], rows)


def counted_instructions(args, with_picker=False):
    """Returns the instructions per request of each round, by kind of body. `with_picker` also counts
    requests through Envoy and the picker, if Envoy is installed. Those take 5 ms each, so that more of
    them have a log entry of their own, and the count varies by a fifth."""
    bodies = {size: (prompts(length), REQUESTS) for size, length in SIZES.items()}
    agents = agent_bodies(AGENT_SIZES[AGENT_SIZE])
    bodies[f"agent, {AGENT_SIZE}"] = (agents, AGENT_REQUESTS)
    figures = {}
    (picker,) = free_ports(1)
    with Stage(args, "0,1", "0,1", MEMORY if os.path.isdir(MEMORY) else None) as stage:
        counted = stage.folder / "callgrind.out"
        program = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={counted}"]
        program += ["--instr-atstart=no", str(args.quorate)]
        engines, settings = start_engines(stage), picker_settings(picker)
        subject = start_quorate(stage, engines, program=program, settings=settings)
        pid = subject.processes[0].child.pid
        loads = [(kind, subject.port, *of) for kind, of in bodies.items()]
        loads.append((IN_SESSION, subject.port, *bodies["1 KB"]))
        if with_picker and (gateway := start_gateway(stage, picker)):
            loads += [(f"picker, {size}", gateway.port, *bodies[size]) for size in SIZES]
        for kind, port, made, requests in loads:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            sessions = SESSIONS if kind == IN_SESSION else None
            send(client, made, WARM_UP, sessions)
            for _ in range(args.rounds):
                idle, seconds = count(pid, counted, lambda: time.sleep(IDLE_SECONDS))
                busy, took = count(pid, counted, lambda: send(client, made, requests, sessions))
                own = (busy - idle * took / seconds) / requests
                figures.setdefault(kind, []).append(own)
    return figures


def count(pid, file, act):
    """Calls `act`. Returns the number of instructions meanwhile, and the duration in seconds."""
    control(pid, "--instr=on")
    control(pid, "-z")
    began = time.monotonic()
    act()
    seconds = time.monotonic() - began
    control(pid, "-d")
    control(pid, "--instr=off")
    newest = max(file.parent.glob(f"{file.name}*"), key=lambda it: it.stat().st_mtime_ns)
    total = re.search(r"^(?:summary|totals): (\d+)", newest.read_text(), re.M)
    if not total or total.group(1) == "0":
        sys.exit(f"callgrind counted nothing in {newest}")
    return int(total.group(1)), seconds


def control(pid, flag):
    command = ["callgrind_control", flag, str(pid)]
    subprocess.run(command, check=True, capture_output=True)


def prompts(length):
    """Yields bodies whose prompts differ at their end."""
    shared = ("All prompts of this race begin alike. " * (length // 38 + 1))[: length - DIFFERENT]
    while True:
        message = {"role": "user", "content": shared + f"{next(NUMBERS):0{DIFFERENT}d}"}
        yield json.dumps({"model": "m", "max_tokens": 1, "messages": [message]})


def agent_bodies(length):
    """Yields the bodies of an agent's conversation, whose last message differs."""
    head, tail = agent_body(length).split(UNIQUE)
    while True:
        yield f"{head}{next(NUMBERS):016}{tail}"


def send(client, bodies, requests, sessions=None):
    """Sends requests one after the other, as turns of `sessions` in turn if given."""
    for body in itertools.islice(bodies, requests):
        head = {"content-type": "application/json"}
        if sessions:
            head["x-quorate-session"] = next(sessions)
        client.request("POST", "/v1/chat/completions", body.encode(), head)
        response = client.getresponse()
        response.read()
        assert response.status == 200, response.status
