"""A cluster of replicas with emulated engines, as processes of this machine: for checks that ask real ones.

`.ci/api/check.py`, `chaos-tests/envoy`, `monitoring/check.py` and `load-balancers/try.py` start theirs by it.
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

START_S = 60


def free_ports(count):
    """Ports of loopback that nothing listened on a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def on_loopback(count):
    """As many addresses of data, admin and peer ports."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(3 * count)]
    return [tuple(ports[3 * nth : 3 * nth + 3]) for nth in range(count)]


def get(url, timeout=5):
    """The body of an answer of success."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read()


class Cluster:
    """Processes whose files and logs are in a folder, and the replicas and engines among them. They end with the
    cluster's `with`, also after SIGTERM.

    `replicas`: the addresses of each one's data, admin and peer ports. `engines`: those of the engines, to
    which `add_engine` adds.
    """

    def __init__(self, binary, folder, replicas):
        self.binary, self.folder, self.replicas = str(binary), str(folder), replicas
        self.engines, self.processes = {}, {}

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return self

    def __exit__(self, *_):
        # The first one is heeded.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.stop()

    def start(self, name, *command, **settings):
        """Starts a process whose output goes to a log of its name."""
        with open(f"{self.folder}/{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, **settings)
        return self.processes[name]

    def add_engine(self, address, *flags, **keys):
        """Starts an emulated engine; `keys` are further ones of its `[[backends]]`."""
        name = f"engine-{len(self.engines) + 1}"
        self.engines[name] = {"id": name, "url": f"http://{address}", **keys}
        self.start(name, self.binary, "engine", "--listen", address, *flags)

    def configure(self, settings="", tables=""):
        """Writes the config of each replica: `settings` are dotted keys, `tables` follow what is of each."""
        peers = json.dumps([peer for *_, peer in self.replicas])
        for engine in self.engines.values():
            keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in engine.items())
            tables += f"[[backends]]\n{keys}"
        for number, (data, admin, peer) in enumerate(self.replicas, 1):
            with open(self.config(number), "w", encoding="utf-8") as config:
                config.write(
                    f'{settings}\nnode.id = {number}\nnode.data_dir = "{self.folder}/data-{number}"\n'
                    f"cluster.peers = {peers}\ncluster.bootstrap_expect = {len(self.replicas)}\n"
                    f'listen.data = "{data}"\nlisten.admin = "{admin}"\nlisten.peer = "{peer}"\n{tables}'
                )

    def config(self, number):
        return f"{self.folder}/replica-{number}.toml"

    def start_replica(self, number):
        return self.start(f"replica-{number}", self.binary, "serve", "--config", self.config(number))

    def start_replicas(self):
        """Starts all, and returns once every one is ready."""
        for number in range(1, len(self.replicas) + 1):
            self.start_replica(number)
        self.wait_all_ready()

    def wait_all_ready(self):
        for number in range(1, len(self.replicas) + 1):
            self.wait_ready(number)

    def wait_ready(self, number):
        data = self.replicas[number - 1][0]
        self.until(f"replica {number} is ready", lambda: get(f"http://{data}/health"))

    def until(self, what, is_met):
        """Waits for a condition that stays true."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                if is_met():
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.1)
        sys.exit(f"not in time: {what}\n{self.tails()}")

    def tails(self):
        """The end of every log."""
        told = ""
        for name in self.processes:
            with open(f"{self.folder}/{name}.log", encoding="utf-8", errors="replace") as log:
                told += f"-- {name}\n{log.read()[-2000:]}\n"
        return told

    def check_alive(self):
        """Exits if a process has ended."""
        dead = [name for name, process in self.processes.items() if process.poll() is not None]
        if dead:
            sys.exit(f"ended: {', '.join(dead)}\n{self.tails()}")

    def stop(self):
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
