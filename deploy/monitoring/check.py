"""Every expression of the dashboards and alerts, asked of a Prometheus that scrapes a cluster under load.

Each panel must have data, but for those of what did not happen, which are named below.
"""

import glob
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
QUORATE = os.environ["QUORATE"]
REPLICAS = 3
ENGINES = 2
# Seconds of load before the leader is killed, and after.
LOAD = 25
# Expressions without data here: nothing of the kind happened, and their series begin with the first time.
MAY_BE_EMPTY = ["quorate_admission_refused_total", "quorate_route_filtered_total", 'outcome!="finished"']


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def get(url, timeout=5):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read()


def until(what, is_met):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if is_met():
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.2)
    sys.exit(f"not in time: {what}")


class Cluster:
    def __init__(self, folder):
        self.folder = folder
        self.processes = {}
        ports = free_ports(3 * REPLICAS + 3 * ENGINES + 1)
        self.replicas = [ports[3 * nth : 3 * nth + 3] for nth in range(REPLICAS)]
        engines = ports[3 * REPLICAS : -1]
        self.engines = [engines[3 * nth : 3 * nth + 3] for nth in range(ENGINES)]
        self.prometheus = ports[-1]
        self.is_over = threading.Event()

    def start(self, name, *command):
        with open(f"{self.folder}/{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def start_all(self):
        backends = ""
        for nth, (port, events, replay) in enumerate(self.engines):
            addresses = [f"tcp://127.0.0.1:{each}" for each in (events, replay)]
            self.start(f"engine-{nth}", QUORATE, "engine", "--listen", f"127.0.0.1:{port}", "--speed", "20",
                       "--kv-events", addresses[0], "--kv-replay", addresses[1])  # fmt: skip
            backends += f'[[backends]]\nid = "engine-{nth}"\nurl = "http://127.0.0.1:{port}"\n'
            backends += f'kv_events = "{addresses[0]}"\nkv_replay = "{addresses[1]}"\n'
        peers = json.dumps([f"127.0.0.1:{peer}" for _, _, peer in self.replicas])
        for number, (data, admin, peer) in enumerate(self.replicas, 1):
            with open(f"{self.folder}/replica-{number}.toml", "w", encoding="utf-8") as config:
                config.write(
                    f'node = {{ id = {number}, data_dir = "{self.folder}/data-{number}" }}\n'
                    f"cluster = {{ peers = {peers}, bootstrap_expect = {REPLICAS} }}\n"
                    # A limit, so that requests wait.
                    f"admission.concurrency = 2\n"
                    f'[listen]\ndata = "127.0.0.1:{data}"\nadmin = "127.0.0.1:{admin}"\npeer = "127.0.0.1:{peer}"\n'
                    f'[[models]]\nname = "*"\ntokenizer = "engine"\n{backends}'
                )
            self.start(f"replica-{number}", QUORATE, "serve", "--config", f"{self.folder}/replica-{number}.toml")
        for data, _, _ in self.replicas:
            until("every replica is ready", lambda port=data: get(f"http://127.0.0.1:{port}/health"))

    def start_prometheus(self):
        targets = json.dumps([f"127.0.0.1:{admin}" for _, admin, _ in self.replicas])
        with open(f"{self.folder}/prometheus.yml", "w", encoding="utf-8") as config:
            config.write(
                "global: { scrape_interval: 1s, evaluation_interval: 1s }\n"
                f"rule_files: [{HERE}/../kubernetes/helm/quorate/files/alerts.yaml]\n"
                f"scrape_configs: [{{ job_name: quorate, static_configs: [{{ targets: {targets} }}] }}]\n"
            )
        self.start("prometheus", "prometheus", f"--config.file={self.folder}/prometheus.yml",
                   f"--storage.tsdb.path={self.folder}/series",
                   f"--web.listen-address=127.0.0.1:{self.prometheus}")  # fmt: skip
        until("Prometheus is ready", lambda: get(f"http://127.0.0.1:{self.prometheus}/-/ready"))

    def client(self, number):
        """Sends chats until it is told to stop; a replica that is down is passed over."""
        nth = 0
        while not self.is_over.is_set():
            nth += 1
            data = self.replicas[(number + nth) % REPLICAS][0]
            text = f"Number {nth % 30} of {number}: " + "tell me about quorums. " * 40
            body = {"model": "emulated", "user": f"user-{number}", "max_tokens": 16, "stream": nth % 2 == 0,
                    "messages": [{"role": "user", "content": text}]}  # fmt: skip
            request = urllib.request.Request(
                f"http://127.0.0.1:{data}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json", "x-quorate-user": f"user-{number}"},
            )
            try:
                urllib.request.urlopen(request, timeout=30).read()
            except (OSError, http.client.HTTPException):
                # Its replica was killed.
                time.sleep(0.05)

    def leader(self):
        for number, (_, admin, _) in enumerate(self.replicas, 1):
            if self.processes[f"replica-{number}"].poll() is None:
                if json.loads(get(f"http://127.0.0.1:{admin}/admin/v1/cluster"))["role"] == "leader":
                    return number
        raise ValueError("nobody leads")

    def query(self, expression):
        query = urllib.parse.urlencode({"query": expression})
        try:
            answer = get(f"http://127.0.0.1:{self.prometheus}/api/v1/query?{query}")
        except urllib.error.HTTPError as error:
            sys.exit(f"{expression}: {error.read().decode()}")
        return json.loads(answer)["data"]["result"]

    def stop(self):
        self.is_over.set()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def panels():
    """Title and expression of each panel, of all dashboards."""
    for file in sorted(glob.glob(f"{HERE}/dashboards/*.json")):
        with open(file, encoding="utf-8") as text:
            dashboard = json.load(text)
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"].replace("$__rate_interval", "20s").replace("$job", ".+")
                yield f"{dashboard['title']}: {panel['title']}", expression
        for annotation in dashboard["annotations"]["list"]:
            yield f"{dashboard['title']}: {annotation['name']}", annotation["expr"].replace("$job", ".+")


def are_known():
    """What is asked for is what the reference lists."""
    with open(f"{HERE}/../../docs/reference/metrics.md", encoding="utf-8") as file:
        known = set(re.findall(r"^\| `([a-z_]+)`", file.read(), re.M))
    ending = re.compile("_(bucket|sum|count)$")
    for title, expression in panels():
        for name in re.findall(r"(?:quorate|process)_[a-z_]+", expression):
            if name not in known and ending.sub("", name) not in known:
                sys.exit(f"{title}: {name} is not in docs/reference/metrics.md")
    with open(f"{HERE}/../../docs/guide/runbook.md", encoding="utf-8") as file:
        runbook = file.read()
    with open(f"{HERE}/../kubernetes/helm/quorate/files/alerts.yaml", encoding="utf-8") as file:
        for alert in re.findall(r"- alert: (\w+)", file.read()):
            if f"`{alert}`" not in runbook:
                sys.exit(f"{alert} is not in docs/guide/runbook.md")


def main():
    are_known()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder)
        try:
            run(cluster)
        finally:
            cluster.stop()


def run(cluster):
    cluster.start_all()
    cluster.start_prometheus()
    clients = [threading.Thread(target=cluster.client, args=(nth,), daemon=True) for nth in range(8)]
    for client in clients:
        client.start()
    time.sleep(LOAD)
    leader = cluster.leader()
    cluster.processes[f"replica-{leader}"].kill()
    until("another replica leads", lambda: cluster.leader() != leader)
    time.sleep(15)
    fired = {each["metric"]["alertname"] for each in cluster.query('ALERTS{alertstate=~"firing|pending"}')}
    if not {"QuorateReplicaDown", "QuorateQuorumAtRisk"} <= fired:
        sys.exit(f"a replica is down, and these alerts know it: {sorted(fired)}")
    cluster.start(f"replica-{leader}", QUORATE, "serve", "--config", f"{cluster.folder}/replica-{leader}.toml")
    time.sleep(LOAD)
    empty, asked = [], 0
    for title, expression in panels():
        asked += 1
        if not cluster.query(expression) and not any(part in expression for part in MAY_BE_EMPTY):
            empty.append(f"{title}: {expression}")
    if empty:
        sys.exit("without data:\n" + "\n".join(empty))
    print(f"dashboards: {asked} expressions, all with data after the leader was killed; alerts then: {sorted(fired)}")


main()
