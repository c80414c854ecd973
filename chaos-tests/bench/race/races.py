"""The races: subjects, loads, and the table of each."""

import collections
import statistics
import subprocess
import sys
import time

from loads import AGENT_SIZES, SIZES, h2load, wrk, wrk_agents
from programs import LOAD_CORE, SUBJECT_CORE, Stage, free_ports, get
from subjects import (
    Certificate,
    Subject,
    start_engines,
    start_envoy,
    start_nginx,
    start_quorate,
    start_replicas,
    start_router,
    wait_for,
)

CONNECTIONS = 16
EVENTS = (32, 500)
# Milliseconds between two events of a stream, by description; 0 for no pause.
PACES = {"as fast as the engine writes": 0, "in steps of 4 ms": 4}
FLEETS = (1, 8, 64)
BOTH_CORES = f"{SUBJECT_CORE},{LOAD_CORE}"

# CPU time per request and median latency, in microseconds, and requests per second.
Figures = collections.namedtuple("Figures", "cpu p50 rate")


def measure(args, subjects, cases):
    """Returns median figures by (case, subject). `cases` contains functions that load a subject for
    a number of seconds."""
    rows = {}
    for round_ in range(args.rounds + 1):
        for case, load in cases.items():
            for subject in subjects:
                seconds = args.seconds if round_ else 1
                before = subject.cpu_us()
                told = load(subject, seconds)
                cpu = (subject.cpu_us() - before) / told.requests
                if round_:  # The first round is a warm-up.
                    row = Figures(cpu, told.p50, told.requests / seconds)
                    rows.setdefault((case, subject.name), []).append(row)
    return {key: medians(found) for key, found in rows.items()}


def medians(rows):
    return Figures(*(statistics.median(column) for column in zip(*rows)))


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    print("\n".join(lines) + "\n", flush=True)


def beside(value, base, digits=1):
    """Formats a figure with its ratio to `base`."""
    return f"{value:.{digits}f} ({value / base:.2f})"


def compare(subjects, cases, figures, peer):
    """Prints the CPU time per request, with its ratio to that of the subject `peer`."""
    rows = []
    for subject in subjects:
        cells = [beside(figures[case, subject.name].cpu, figures[case, peer].cpu) for case in cases]
        rows.append([subject.name, *cells])
    table(["CPU us a request (times nginx)", *cases], rows)


def basic(args):
    """HTTP/1.1 without TLS: CPU time and added latency, also of other routers."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        subjects = [
            Subject("engine", engines[0], []),
            start_nginx(stage, engines),
            start_envoy(stage, engines),
            start_quorate(stage, engines),
            start_quorate(stage, engines, "quorate, 3 replicas on one core", replicas=3),
            start_router(stage, engines, "sglang-router", ["sglang-router"]),
            start_router(stage, engines, "vllm-router", ["vllm-router"]),
            start_router(stage, engines, "SMG", ["smg", "launch"]),
        ]
        subjects = [subject for subject in subjects if subject]
        cases = kept_connections(stage)
        figures = measure(args, subjects, cases)
        rows = []
        for subject in subjects[1:]:
            cells = []
            for size in SIZES:
                case = size, CONNECTIONS
                cells.append(beside(figures[case, subject.name].cpu, figures[case, "nginx"].cpu))
            for size in SIZES:
                case = size, 1
                direct = figures[case, "engine"].p50
                added, base = (figures[case, who].p50 - direct for who in (subject.name, "nginx"))
                cells.append(beside(added, base, 0))
            rows.append([subject.name, *cells])
        head = [f"{size}, {CONNECTIONS} connections: CPU us (times nginx)" for size in SIZES]
        head += [f"{size}, 1 connection: added p50 us (times nginx)" for size in SIZES]
        table(["", *head], rows)


def agents(args):
    """Agents' bodies of 32, 220 and 570 KB, with tools and results full of escapes: CPU time."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        subjects = [start_nginx(stage, engines), start_envoy(stage, engines)]
        subjects = [subject for subject in subjects if subject] + [start_quorate(stage, engines)]
        cases = {
            size: lambda subject, seconds, length=length: wrk_agents(
                stage, subject, length, CONNECTIONS, seconds
            )
            for size, length in AGENT_SIZES.items()
        }
        compare(subjects, cases, measure(args, subjects, cases), "nginx")


def kept_connections(stage, counts=(CONNECTIONS, 1)):
    """Returns loads by wrk over persistent connections, by (size, number of connections)."""
    return {
        (size, count): lambda subject, seconds, length=length, count=count: wrk(
            stage, subject, length, count, seconds
        )
        for size, length in SIZES.items()
        for count in counts
    }


def named(cases):
    return {
        f"{size}, {count} connection{'s' if count > 1 else ''}": load
        for (size, count), load in cases.items()
    }


def http2(args):
    """HTTP/2 without TLS from clients, HTTP/1.1 to engines: CPU time."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        subjects = [start_nginx(stage, engines, http2=True), start_quorate(stage, engines)]
        cases = {
            f"{size}, {label}": lambda subject, seconds, length=length, shape=shape: h2load(
                stage, subject, length, *shape, seconds
            )
            for size, length in SIZES.items()
            for label, shape in {
                "16 connections": (16, 1),
                "1 connection of 16 streams": (1, 16),
            }.items()
        }
        compare(subjects, cases, measure(args, subjects, cases), "nginx")


def tls(args):
    """Persistent connections from clients, with and without TLS: CPU time."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        certificate = Certificate(stage.folder)
        encrypted = [
            start_nginx(stage, engines, "nginx, TLS", certificate=certificate),
            start_quorate(stage, engines, "quorate, TLS", certificate=certificate),
        ]
        clear = [start_nginx(stage, engines), start_quorate(stage, engines, "quorate")]
        for subject in encrypted:
            print(f"{subject.name}: {cipher(subject)}", file=sys.stderr)
        cases = named(kept_connections(stage))
        figures = measure(args, encrypted + clear, cases)
        compare(encrypted, cases, figures, "nginx, TLS")
        compare(clear, cases, figures, "nginx")


def cipher(subject):
    """Returns the protocol version and cipher suite that OpenSSL negotiates with a subject."""
    command = ["openssl", "s_client", "-brief", "-connect", f"127.0.0.1:{subject.port}"]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stderr
    wanted = ("Protocol version", "Ciphersuite")
    return ", ".join(line for line in told.splitlines() if line.startswith(wanted))


def streams(args):
    """Event streams over HTTP/1.1: CPU time per request and per event."""
    for pace, step in PACES.items():
        with Stage(args) as stage:
            ports = free_ports(2)
            engine = args.here / "stream_engine.py"
            stage.start("engine", stage.load_cores, [sys.executable, engine, step, *ports])
            wait_for("the engine answers", lambda: get(ports[0], "/events"))
            subjects = [start_nginx(stage, ports), start_quorate(stage, ports)]
            stream_table(args, stage, subjects, ports[0], pace)


def stream_table(args, stage, subjects, engine, pace):
    cases = {}
    for events in EVENTS:
        cases[f"{events} events"] = lambda subject, seconds, events=events: stream_load(
            stage, subject, engine, events, seconds
        )
    figures = measure(args, subjects, cases)
    rows = []
    for subject in subjects:
        cells = []
        for events, case in zip(EVENTS, cases):
            cpu, base = figures[case, subject.name].cpu, figures[case, "nginx"].cpu
            each = f"{cpu / events:.2f}"
            cells += [beside(cpu, base), each, f"{figures[case, subject.name].rate * events:.0f}"]
        rows.append([subject.name, *cells])
    head = [f"1 KB, {CONNECTIONS} connections, events {pace}"]
    for case in cases:
        head += [f"{case}: CPU us a request (times nginx)", "us an event", "events a second"]
    table(head, rows)


def stream_load(stage, subject, engine, events, seconds):
    """Loads a subject with streams. Counts requests by the events that the engine wrote, because
    streams that the end of the load cuts off also cost CPU time."""
    before = int(get(engine, "/events"))
    told = wrk(stage, subject, SIZES["1 KB"], CONNECTIONS, seconds, events)
    written = int(get(engine, "/events")) - before
    return told._replace(requests=written / events)


def fleet(args):
    """1, 8 and 64 backends: CPU time per request, and CPU time when idle."""
    with Stage(args) as stage:
        all_engines = start_engines(stage, max(FLEETS))
        subjects = []
        for count in FLEETS:
            engines = all_engines[:count]
            subjects.append(start_nginx(stage, engines, f"nginx, {count}"))
            subjects.append(start_quorate(stage, engines, f"quorate, {count}"))
        cases = named(kept_connections(stage, counts=(CONNECTIONS,)))
        figures = measure(args, subjects, cases)
        idle = idle_cpu(subjects, args.seconds)
        rows = []
        for subject in subjects:
            peer = subject.name.replace("quorate", "nginx")
            cells = [beside(figures[case, subject.name].cpu, figures[case, peer].cpu) for case in cases]
            rows.append([subject.name, *cells, f"{idle[subject.name]:.1f}"])
        columns = [f"{case}: CPU us (times nginx)" for case in cases]
        table(["backends", *columns, "idle: CPU ms a second"], rows)


def cores(args):
    """One core, and two that the load shares: CPU time per request, and throughput of two cores."""
    rows, figures = [], {}
    for label, places in {"one core": (SUBJECT_CORE, LOAD_CORE), "two": (BOTH_CORES, BOTH_CORES)}.items():
        with Stage(args, *places) as stage:
            engines = start_engines(stage)
            subjects = [start_nginx(stage, engines), start_quorate(stage, engines)]
            cases = named(kept_connections(stage, counts=(CONNECTIONS,)))
            for (case, name), row in measure(args, subjects, cases).items():
                figures[case, name, label] = row.cpu
    for subject in subjects:
        cells = []
        for case in cases:
            one, two = (figures[case, subject.name, label] for label in ("one core", "two"))
            cells += [f"{one:.1f}, {two:.1f}", f"{2 * one / two:.2f}"]
        rows.append([subject.name, *cells])
    head = [""]
    for case in cases:
        head += [f"{case}: CPU us a request on one core, on two", "requests of two cores over one's"]
    table(head, rows)


def idle_cpu(subjects, seconds):
    """Returns the CPU time of each subject when idle, in milliseconds per second."""
    before = {subject.name: subject.cpu_us() for subject in subjects}
    time.sleep(seconds)
    return {one.name: (one.cpu_us() - before[one.name]) / 1000 / seconds for one in subjects}


class LostLead(Exception):
    """The role of a replica changed during a load."""


class Member(Subject):
    """The replica of a cluster that has the wanted role, alone on the subject's core. The other
    replicas share the load's core."""

    def __init__(self, name, cluster, wanted):
        self.name, self.scheme, self.cluster, self.wanted = name, "http", cluster, wanted

    def take_core(self):
        self.chosen = next(one for one in self.cluster if one.role() == self.wanted)
        self.port, self.processes = self.chosen.port, self.chosen.processes
        for replica in self.cluster:
            replica.process.move(SUBJECT_CORE if replica is self.chosen else LOAD_CORE)
        time.sleep(0.5)

    def load(self, load, seconds):
        """Returns the figures of a load, and the CPU time of the other replicas per request. Raises
        `LostLead` if the replica lost its role."""
        self.take_core()
        others = [one for one in self.cluster if one is not self.chosen]
        before, before_others = self.cpu_us(), sum(one.cpu_us() for one in others)
        told = load(self, seconds)
        cpu, cpu_others = self.cpu_us() - before, sum(one.cpu_us() for one in others) - before_others
        if self.chosen.role() != self.wanted:
            raise LostLead
        row = Figures(cpu / told.requests, told.p50, told.requests / seconds)
        return row, cpu_others / told.requests


def replicas(args):
    """One replica, leader of three, follower of three: its CPU time and that of the others."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        alone = Member("one replica", start_replicas(stage, engines, 1), "leader")
        cluster = start_replicas(stage, engines, 3)
        members = [
            alone,
            Member("leader of three, asked", cluster, "leader"),
            Member("follower of three, asked", cluster, "follower"),
        ]
        cases = named(kept_connections(stage, counts=(CONNECTIONS,)))
        figures = {}
        for round_ in range(args.rounds + 1):
            for case, load in cases.items():
                for member in members:
                    row = keep_role(member, load, args.seconds if round_ else 1)
                    if round_:
                        figures.setdefault((case, member.name), []).append(row)
        replica_table(members, cases, figures)


def keep_role(member, load, seconds):
    for _ in range(5):
        try:
            return member.load(load, seconds)
        except (LostLead, StopIteration):
            print(f"{member.name}: the lead changed; once more", file=sys.stderr)
            time.sleep(1)
    sys.exit(f"{member.name}: the lead changes during each load")


def replica_table(members, cases, figures):
    rows = []
    for member in members:
        cells = []
        for case in cases:
            row = medians([own for own, _ in figures[case, member.name]])
            base = medians([own for own, _ in figures[case, members[0].name]])
            others = statistics.median(other for _, other in figures[case, member.name])
            cells += [beside(row.cpu, base.cpu), f"{others:.1f}", f"{row.rate:.0f}"]
        rows.append([member.name, *cells])
    head = ["alone on its core"]
    for case in cases:
        head += [f"{case}: its CPU us (times one replica)", "the others' CPU us", "requests a second"]
    table(head, rows)
