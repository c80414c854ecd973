"""Three replicas behind a load balancer, under load: what clients see of a drain, a kill and a cut cable.

Prints a row per phase, and fails if a request failed where none may: while nothing happens and on a drain.
"""

import collections
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from cluster import Cluster  # noqa: E402

BALANCER = sys.argv[1]
QUORATE = os.environ["QUORATE"]
REPLICAS = [f"10.77.0.{11 + nth}" for nth in range(3)]
ENGINES = ["10.77.0.21", "10.77.0.22"]
CLIENTS = 8
# Requests that a client sends over a connection before it opens another.
REUSED = 20
NAME = "quorate.test"
# Phases in which no request may fail.
WITHOUT_FAILURE = ["steady", "drain", "restart"]


class Balanced(Cluster):
    """Replicas and engines with addresses of their own, and a load balancer before the replicas."""

    def __init__(self, folder):
        replicas = [(f"{it}:8080", f"{it}:8081", f"{it}:8082") for it in REPLICAS]
        super().__init__(QUORATE, folder, replicas)
        for engine in ENGINES:
            self.add_engine(f"{engine}:8000", "--speed", "20")
        self.configure(
            "insecure = true # a network without others\n"
            # Unhurried, as a busy machine runs all of this.
            'cluster.heartbeat = "200ms"\ncluster.election_timeout = "1s..2s"\n'
            'users.trusted_proxies = ["10.77.0.0/24"]'
        )

    def start_balancer(self):
        if BALANCER == "haproxy":
            self.start("balancer", "haproxy", "-db", "-f", f"{HERE}/haproxy.cfg")
        elif BALANCER == "nginx":
            os.mkdir(f"{self.folder}/nginx")
            command = ["nginx", "-p", f"{self.folder}/nginx", "-e", "stderr", "-c", f"{HERE}/nginx.conf"]
            self.start("balancer", *command, "-g", "daemon off;")
        elif BALANCER == "caddy":
            home = {**os.environ, "HOME": self.folder, "XDG_DATA_HOME": self.folder, "XDG_CONFIG_HOME": self.folder}
            command = ["caddy", "run", "--config", f"{HERE}/Caddyfile", "--adapter", "caddyfile"]
            self.start("balancer", *command, env=home)
        elif BALANCER == "envoy":
            self.start("balancer", "envoy", "-c", f"{HERE}/envoy.yaml", "--disable-hot-restart")
        else:
            with open(f"{self.folder}/replicas.hosts", "w", encoding="utf-8") as hosts:
                hosts.writelines(f"{address} {NAME}\n" for address in REPLICAS)
            with open(f"{HERE}/dnsmasq.conf", encoding="utf-8") as example:
                text = example.read().replace("/run/quorate", self.folder)
            with open(f"{self.folder}/dnsmasq.conf", "w", encoding="utf-8") as config:
                config.write(text)
            server = self.start("balancer", "dnsmasq", "-k", "-C", f"{self.folder}/dnsmasq.conf")
            hosts = f"{self.folder}/replicas.hosts"
            self.start("healthy", f"{HERE}/dns-healthy", NAME, hosts, str(server.pid), *REPLICAS)
        self.until("the balancer answers", lambda: ask_once(Client(0).connect()) is None)


class Connection(http.client.HTTPConnection):
    """To one address of a name, or to the next that can be reached: as clients of a name with several do."""

    def connect(self):
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for at, (*_, address) in enumerate(found):
            try:
                self.sock = socket.create_connection(address[:2], timeout=1)
                self.sock.settimeout(15)
                return
            except OSError:
                if at + 1 == len(found):
                    raise


def ask_once(connection, nth=0):
    """A chat, streamed every other time; what failed, if something did. Closes what may not be used again."""
    is_stream = nth % 2 == 1
    body = json.dumps({
        "model": "emulated",
        "stream": is_stream,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": f"Number {nth % 50}: " + "tell me about quorums. " * 20}],
    })
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    if answer.status != 200:
        return f"status {answer.status}"
    if (b"data: [DONE]" if is_stream else b'"chat.completion"') not in text:
        return f"cut short behind {text[-80:]!r}"
    return None


class Client:
    """One that asks, again and again."""

    def __init__(self, seed):
        self.seed = seed

    def connect(self):
        return Connection(NAME if BALANCER == "dnsmasq" else "10.77.0.1", 8080 if BALANCER == "dnsmasq" else 80)

    def run(self, load):
        nth = self.seed * 1000
        while not load.is_over:
            connection = self.connect()
            for _ in range(REUSED):
                nth += 1
                load.count(ask_once(connection, nth))
                if connection.sock is None or load.is_over:
                    break
                time.sleep(0.03)
            connection.close()


class Load:
    """What clients saw, by phase."""

    def __init__(self):
        self.phase, self.is_over = "steady", False
        self.lock = threading.Lock()
        self.asked, self.failed = collections.Counter(), collections.defaultdict(collections.Counter)
        self.last, self.gaps = time.monotonic(), collections.Counter()

    def count(self, failure):
        with self.lock:
            now, phase = time.monotonic(), self.phase
            self.asked[phase] += 1
            if failure:
                # A request that began before what happened is its victim too.
                self.failed[phase][failure] += 1
            else:
                self.gaps[phase] = max(self.gaps[phase], now - self.last)
                self.last = now


def cut_off(address, is_cut):
    """Pulls the cable of an address: packets to it and from it go nowhere, and nobody is told."""
    verb = "add" if is_cut else "delete"
    subprocess.run(["nft", verb, "element", "inet", "cut", "addresses", f"{{ {address} }}"], check=True)


def happenings(fleet, load):
    """One thing after the other, with the load going on."""
    time.sleep(4)
    load.phase = "drain"
    leaving = fleet.processes["replica-2"]
    leaving.send_signal(signal.SIGTERM)
    if leaving.wait(60) != 0:
        sys.exit("the drain failed")
    time.sleep(2)
    load.phase = "restart"
    fleet.start_replica(2)
    fleet.wait_ready(2)
    time.sleep(3)
    load.phase = "kill"
    fleet.processes["replica-3"].kill()
    fleet.processes["replica-3"].wait()
    time.sleep(4)
    fleet.start_replica(3)
    fleet.wait_ready(3)
    time.sleep(3)
    load.phase = "cut off"
    cut_off(REPLICAS[0], True)
    time.sleep(8)
    cut_off(REPLICAS[0], False)
    fleet.wait_ready(1)
    time.sleep(4)


def report(load):
    print(f"| {BALANCER} | requests | failed | longest pause, s | how |")
    print("| --- | --- | --- | --- | --- |")
    for phase in ["steady", "drain", "restart", "kill", "cut off"]:
        failed = load.failed[phase]
        how = ", ".join(f"{count} {what}" for what, count in failed.items())
        print(f"| {phase} | {load.asked[phase]} | {failed.total()} | {load.gaps[phase]:.1f} | {how} |", flush=True)


def main():
    load = Load()
    clients = [threading.Thread(target=Client(seed).run, args=[load]) for seed in range(CLIENTS)]
    with tempfile.TemporaryDirectory(prefix="quorate-balancer-") as folder, Balanced(folder) as fleet:
        try:
            fleet.start_replicas()
            fleet.start_balancer()
            for client in clients:
                client.start()
            happenings(fleet, load)
        except BaseException:
            print(fleet.tails(), file=sys.stderr)
            raise
        finally:
            load.is_over = True
            for client in clients:
                if client.ident:
                    client.join()
    report(load)
    bad = [phase for phase in WITHOUT_FAILURE if load.failed[phase]]
    if bad:
        sys.exit(f"{BALANCER}: requests failed at {', '.join(bad)}")


main()
