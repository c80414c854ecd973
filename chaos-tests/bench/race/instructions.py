"""Instructions that a request takes, counted by valgrind. They depend less than CPU time on how busy
the machine is."""

import http.client
import itertools
import json
import re
import statistics
import subprocess
import sys
import time

from loads import DIFFERENT, SIZES
from programs import Stage
from races import table
from subjects import start_engines, start_quorate

WARM_UP, REQUESTS, IDLE_SECONDS = 50, 400, 8
NUMBERS = itertools.count()


def instructions(args):
    """Instructions per request in user mode, one request at a time (valgrind's callgrind)."""
    rows = []
    with Stage(args, "0,1", "0,1") as stage:
        counted = stage.folder / "callgrind.out"
        program = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={counted}"]
        program += ["--instr-atstart=no", str(args.quorate)]
        subject = start_quorate(stage, start_engines(stage), program=program)
        pid = subject.processes[0].child.pid
        client = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=120)
        for size, length in SIZES.items():
            send(client, length, WARM_UP)
            found = []
            for _ in range(args.rounds):
                idle, seconds = count(pid, counted, lambda: time.sleep(IDLE_SECONDS))
                busy, took = count(pid, counted, lambda: send(client, length, REQUESTS))
                found.append((busy - idle * took / seconds) / REQUESTS)
            figures = (statistics.median(found), min(found), max(found))
            rows.append([size, *(f"{figure:,.0f}" for figure in figures)])
    table(["instructions a request, less those at rest", "median", "least", "most"], rows)


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


def send(client, length, requests):
    """Sends requests one after the other, whose prompts differ at their end."""
    shared = ("All prompts of this race begin alike. " * (length // 38 + 1))[: length - DIFFERENT]
    for _ in range(requests):
        message = {"role": "user", "content": shared + f"{next(NUMBERS):0{DIFFERENT}d}"}
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": [message]})
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = client.getresponse()
        response.read()
        assert response.status == 200, response.status
