#!/usr/bin/env python3
"""Races Quorate against nginx, and against other routers: CPU of the whole process per request, and
added latency.

One core for the subject, one for the load (wrk) and the engines (nginx, a fixed answer). Prompts share
all but their last 64 bytes. Rounds are interleaved, and figures are medians; what counts is the ratio
to nginx in the same run. Needs nginx and wrk (Debian's packages) and two cores. Routers from PyPI run
where `--routers` names a virtual environment that has them; what is missing is skipped with a word.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ENGINES = [19001, 19002]
SIZES = {"1 KB": 1024, "32 KB": 32 * 1024}
# Bytes at the end of a prompt that differ from request to request.
DIFFERENT = 64
SUBJECT_CORE, LOAD_CORE = "0", "1"
READY_SECONDS = 60
TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
    },
    separators=(",", ":"),
)

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log error;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    client_body_buffer_size 128k;
    keepalive_requests 100000000;
    {servers}
}}
"""

ENGINE = """
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        default_type application/json;
        location = /health {{ return 200 ""; }}
        location = /metrics {{ default_type text/plain; return 200 "vllm:num_requests_running 0\\n"; }}
        location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"m","object":"model"}}]}}'; }}
        location /v1/ {{ return 200 '{answer}'; }}
        location / {{ return 404; }}
    }}
"""

PROXY = """
    upstream engines {{ {members} keepalive 64; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
        }}
    }}
"""

# Each prompt ends in a number of its own.
WRK = """
local shared = string.rep("All prompts of this race begin alike. ", {repeats}):sub(1, {shared})
local head = '{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":"' .. shared
local sent = {first}
request = function()
    sent = sent + 1
    local body = head .. string.format("%0{different}d", sent) .. '"}}]}}'
    return wrk.format("POST", "/v1/chat/completions", {{["content-type"] = "application/json"}}, body)
end
"""

QUORATE = """
[node]
id = {id}
data_dir = "{folder}/data-{id}"

[listen]
data = "127.0.0.1:{data}"
admin = "127.0.0.1:{admin}"
peer = "127.0.0.1:{peer}"

[cluster]
peers = [{peers}]
bootstrap_expect = {replicas}

[[backends]]
id = "engine-1"
url = "http://127.0.0.1:{first}"

[[backends]]
id = "engine-2"
url = "http://127.0.0.1:{second}"
"""


def free_ports(count):
    """Ports that nobody has."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Process:
    """A program on a core, ended with the race."""

    def __init__(self, folder, name, core, command):
        self.log = open(folder / f"{name}.log", "ab")
        command = ["taskset", "-c", core, *map(str, command)]
        self.child = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def cpu_us(self):
        """CPU of the process and its children so far, user and kernel."""
        ticks = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self.child.pid:  # Its session.
                    ticks += int(fields[11]) + int(fields[12])
        return ticks * TICK_US

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.log.close()


class Subject:
    """What is raced: where it listens, and its processes on the subject's core."""

    def __init__(self, name, port, processes):
        self.name, self.port, self.processes = name, port, processes

    def cpu_us(self):
        return sum(process.cpu_us() for process in self.processes)


def nginx(folder, name, core, servers):
    home = folder / name
    home.mkdir()
    config = home / "nginx.conf"
    config.write_text(NGINX.format(folder=home, servers=servers))
    return Process(folder, name, core, ["nginx", "-c", config, "-p", home])


def start_engines(folder):
    servers = "".join(ENGINE.format(port=port, answer=ANSWER) for port in ENGINES)
    return nginx(folder, "engines", LOAD_CORE, servers)


def start_nginx(folder, _args):
    (port,) = free_ports(1)
    members = " ".join(f"server 127.0.0.1:{engine};" for engine in ENGINES)
    proxy = PROXY.format(port=port, members=members)
    return Subject("nginx", port, [nginx(folder, "nginx", SUBJECT_CORE, proxy)])


def start_quorate(folder, args, replicas):
    ports = free_ports(3 * replicas)
    home = folder / f"quorate-{replicas}"
    home.mkdir()
    peers = ", ".join(f'"127.0.0.1:{ports[3 * at + 2]}"' for at in range(replicas))
    processes = []
    for at in range(replicas):
        data, admin, peer = ports[3 * at : 3 * at + 3]
        config = home / f"{at + 1}.toml"
        config.write_text(
            QUORATE.format(
                id=at + 1,
                folder=home,
                data=data,
                admin=admin,
                peer=peer,
                peers=peers,
                replicas=replicas,
                first=ENGINES[0],
                second=ENGINES[1],
            )
        )
        command = [args.quorate, "serve", "--config", config]
        processes.append(Process(folder, f"quorate-{replicas}-{at + 1}", SUBJECT_CORE, command))
    leader = wait_for_leader([ports[3 * at + 1] for at in range(replicas)])
    name = "quorate, one replica" if replicas == 1 else f"quorate, {replicas} replicas on one core"
    return Subject(name, ports[3 * leader], processes)


def wait_for_leader(admins):
    """Which replica leads, once all are ready."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            for admin in admins:
                get(admin, "/readyz")
            roles = [json.loads(get(admin, "/admin/v1/cluster"))["role"] for admin in admins]
            return roles.index("leader")
        time.sleep(0.2)
    sys.exit(f"no replica leads and is ready within {READY_SECONDS} s")


def start_router(folder, args, name, command):
    """A router from PyPI; `command` is what follows the environment's `bin`."""
    program = pathlib.Path(args.routers, "bin", command[0]) if args.routers else None
    if program is None or not program.exists():
        print(f"skipped: {name}: give --routers an environment with it", file=sys.stderr)
        return None
    port, metrics = free_ports(2)
    urls = [f"http://127.0.0.1:{engine}" for engine in ENGINES]
    words = [program, *command[1:], "--host", "127.0.0.1", "--port", port]
    words += ["--prometheus-port", metrics, "--policy", "cache_aware", "--worker-urls", *urls]
    process = Process(folder, name.replace(" ", "-"), SUBJECT_CORE, words)
    return Subject(name, port, [process])


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()


def post(port):
    body = {"model": "m", "messages": [{"role": "user", "content": "is anybody there?"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        answer.read()


def wait_until_it_answers(subject):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            post(subject.port)
            return
        time.sleep(0.2)
    sys.exit(f"{subject.name} does not answer within {READY_SECONDS} s")


FIRST = [0]


def load(folder, port, size, connections, seconds):
    """Requests answered, and their median latency in microseconds."""
    shared = size - DIFFERENT
    FIRST[0] += 100_000_000
    script = folder / "load.lua"
    repeats = shared // 38 + 1
    script.write_text(
        WRK.format(repeats=repeats, shared=shared, different=DIFFERENT, first=FIRST[0])
    )
    command = ["taskset", "-c", LOAD_CORE, "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
    command += ["--latency", "-s", str(script), f"http://127.0.0.1:{port}"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", told)
    if failed:
        sys.exit(f"port {port}: {failed.group(0)}")
    requests = int(re.search(r"(\d+) requests in", told).group(1))
    value, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", told).groups()
    return requests, float(value) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def race(folder, subjects, args):
    """CPU per request, latency and requests a second by (size, connections, subject)."""
    figures = {}
    for round_ in range(args.rounds + 1):
        for size, length in SIZES.items():
            for connections in (16, 1):
                for subject in subjects:
                    before = subject.cpu_us()
                    seconds = args.seconds if round_ else 1
                    requests, p50 = load(folder, subject.port, length, connections, seconds)
                    cpu = (subject.cpu_us() - before) / requests
                    if round_:  # The first warms up.
                        row = figures.setdefault((size, connections, subject.name), [])
                        row.append((cpu, p50, requests / seconds))
    return {
        key: tuple(statistics.median(column) for column in zip(*rows))
        for key, rows in figures.items()
    }


def table(subjects, figures):
    names = [subject.name for subject in subjects if subject.processes]
    rows = [
        "| | "
        + " | ".join(f"{size}, 16 connections: CPU us (times nginx)" for size in SIZES)
        + " | "
        + " | ".join(f"{size}, 1 connection: added p50 us (times nginx)" for size in SIZES)
        + " |"
    ]
    rows.append("| --- " * (1 + 2 * len(SIZES)) + "|")
    for name in names:
        cells = []
        for size in SIZES:
            cpu, base = (figures[size, 16, who][0] for who in (name, "nginx"))
            cells.append(f"{cpu:.1f} ({cpu / base:.2f})")
        for size in SIZES:
            direct = figures[size, 1, "engine"][1]
            added, base = (figures[size, 1, who][1] - direct for who in (name, "nginx"))
            cells.append(f"{added:.0f} ({added / base:.2f})")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    root = pathlib.Path(__file__).resolve().parents[2]
    parser.add_argument(
        "--quorate", default=root / "target/release/quorate", help="the program [%(default)s]"
    )
    parser.add_argument("--routers", help="virtual environment with routers from PyPI")
    parser.add_argument("--seconds", type=int, default=5, help="of each load [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    args = parser.parse_args()
    missing = [tool for tool in ("nginx", "wrk", "taskset") if not shutil.which(tool)]
    if missing:
        sys.exit(f"not run: {', '.join(missing)} is not here: apt-get install nginx-light wrk")
    if (os.cpu_count() or 1) < 2:
        sys.exit("not run: two cores are needed")
    if not pathlib.Path(args.quorate).is_file():
        sys.exit(f"not run: there is no {args.quorate}: cargo build --release")
    started = []
    with tempfile.TemporaryDirectory(prefix="quorate-race-") as name:
        folder = pathlib.Path(name)
        try:
            started.append(start_engines(folder))
            subjects = [Subject("engine", ENGINES[0], [])]
            for start in (
                lambda: start_nginx(folder, args),
                lambda: start_quorate(folder, args, 1),
                lambda: start_quorate(folder, args, 3),
                lambda: start_router(folder, args, "sglang-router", ["sglang-router"]),
                lambda: start_router(folder, args, "vllm-router", ["vllm-router"]),
                lambda: start_router(folder, args, "SMG", ["smg", "launch"]),
            ):
                subject = start()
                if subject:
                    started += subject.processes
                    wait_until_it_answers(subject)
                    subjects.append(subject)
            print(table(subjects, race(folder, subjects, args)))
        except SystemExit:
            for log in sorted(folder.glob("*.log")):
                tail = log.read_text(errors="replace").splitlines()[-5:]
                print(f"--- {log.name}", *tail, sep="\n", file=sys.stderr)
            raise
        finally:
            for process in started:
                process.stop()


if __name__ == "__main__":
    main()
