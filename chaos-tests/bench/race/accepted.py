"""Compares the costs of a request with the last accepted ones, which are in the tree."""

import json
import pathlib
import statistics
import sys

from instructions import AGENT_SIZE, counted_instructions
from loads import AGENT_SIZES, SIZES, wrk, wrk_agents
from programs import Stage
from races import CONNECTIONS, measure, table
from subjects import start_engines, start_nginx, start_quorate

ACCEPTED = pathlib.Path(__file__).resolve().parent / "accepted.json"
# How many times its accepted figure a figure may be. Instructions vary by 4 % between runs on a quiet
# machine. The ratio to nginx depends on the machine: the same program took 3.3 times nginx's CPU for 1 KB
# on one, and 5.3 times on another.
INSTRUCTIONS, RATIO = "thousands of instructions", "CPU, times nginx"
MARGINS = {INSTRUCTIONS: 1.1, RATIO: 1.7}


def accepted(args):
    """Fails if a request costs more than accepted; `--accept` accepts what is measured."""
    found = {
        INSTRUCTIONS: {
            kind: round(statistics.median(each) / 1000)
            for kind, each in counted_instructions(args).items()
        },
        RATIO: ratios(args),
    }
    if args.accept:
        ACCEPTED.write_text(json.dumps(found, indent=2) + "\n")
    known = json.loads(ACCEPTED.read_text())
    rows, worse = [], []
    for unit, margin in MARGINS.items():
        for kind, figure in found[unit].items():
            base = known[unit][kind]
            rows.append([f"{kind}, {unit}", str(base), str(figure), f"{base * margin:.4g}"])
            if figure > base * margin:
                worse.append(rows[-1][0])
    table(["a request", "accepted", "now", "at most"], rows)
    if worse:
        sys.exit(f"costs more than accepted: {'; '.join(worse)}")


def ratios(args):
    """Returns the CPU time of one replica per request as a multiple of nginx's."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        subjects = [start_nginx(stage, engines), start_quorate(stage, engines)]
        cases = {
            size: lambda subject, seconds, length=length: wrk(
                stage, subject, length, CONNECTIONS, seconds
            )
            for size, length in SIZES.items()
        }
        cases[f"agent, {AGENT_SIZE}"] = lambda subject, seconds: wrk_agents(
            stage, subject, AGENT_SIZES[AGENT_SIZE], CONNECTIONS, seconds
        )
        figures = measure(args, subjects, cases)
    base, own = (subject.name for subject in subjects)
    return {case: round(figures[case, own].cpu / figures[case, base].cpu, 2) for case in cases}
