#!/usr/bin/env python3
"""Compares Quorate with nginx and other routers: CPU time of the whole process per request, and
added latency.

The subject runs on one core. The load generators (wrk, h2load) and the engines (nginx with a fixed
response) share another. Prompts differ at most in their last 64 bytes. Rounds are interleaved, and
figures are medians; only their ratio to nginx in the same run is meaningful. Needs nginx and wrk
(Debian packages) and two cores. Routers from PyPI run if the virtual environment of `--routers` has
them; `.ci/run gateway` makes one with Envoy. Skips whatever is not installed, with a message.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys

import races
from programs import skip
from accepted import accepted
from idle import idle
from instructions import instructions
from limits import permits, prefixes
from log import log
from picker import picker
from split import split

# Function of each race, and Debian packages of the tools that it needs in addition to `TOOLS`.
RACES = {
    "basic": (races.basic, {}),
    "agents": (races.agents, {}),
    "http2": (races.http2, {"h2load": "nghttp2-client"}),
    "tls": (races.tls, {"openssl": "openssl"}),
    "streams": (races.streams, {}),
    "picker": (picker, {}),
    "fleet": (races.fleet, {}),
    "idle": (idle, {}),
    "replicas": (races.replicas, {}),
    "cores": (races.cores, {}),
    "split": (split, {}),
    "instructions": (instructions, {"valgrind": "valgrind"}),
    "accepted": (accepted, {"valgrind": "valgrind"}),
    "log": (log, {"ss": "iproute2"}),
    "prefixes": (prefixes, {}),
    "permits": (permits, {}),
}
TOOLS = {"nginx": "nginx-light", "wrk": "wrk", "taskset": "util-linux"}


def arguments():
    here = pathlib.Path(__file__).resolve().parent
    told = "\n".join(f"  {name:10}{run.__doc__}" for name, (run, _) in RACES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"races:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "races", nargs="*", metavar="RACE", help="as below, or all of them: all [basic]"
    )
    program = here.parents[2] / "target/release/quorate"
    parser.add_argument("--quorate", default=program, help="the program [%(default)s]")
    routers = here.parents[2] / "target/envoy"
    routers_help = "virtual environment with routers from PyPI [%(default)s]"
    parser.add_argument("--routers", default=routers, help=routers_help)
    accept = "write the figures of `accepted` to the tree"
    parser.add_argument("--accept", action="store_true", help=accept)
    parser.add_argument("--seconds", type=int, default=5, help="of each load [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    args = parser.parse_args()
    args.here = here
    # `accepted` judges, the others tell.
    told_all = [name for name in RACES if name != "accepted"]
    args.races = told_all if "all" in args.races else args.races or ["basic"]
    unknown = [name for name in args.races if name not in RACES]
    if unknown:
        parser.error(f"no race: {', '.join(unknown)}; there are {', '.join(RACES)} and all")
    return args


def lacking(tools):
    """Returns how to install the tools that are missing, or `None`."""
    missing = {tool: package for tool, package in tools.items() if not shutil.which(tool)}
    if missing:
        return f"no {', '.join(missing)} here: apt-get install {' '.join(missing.values())}"
    return None


def main():
    args = arguments()
    if not pathlib.Path(args.quorate).is_file():
        sys.exit(f"not run: there is no {args.quorate}: cargo build --release")
    if (os.cpu_count() or 1) < 2:
        sys.exit("not run: two cores are needed")
    # Exits by an exception, so that all processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    for name in args.races:
        run, tools = RACES[name]
        why = lacking(TOOLS | tools)
        if why:
            skip(name, why)
        else:
            print(f"### {name}\n", flush=True)
            run(args)


if __name__ == "__main__":
    main()
