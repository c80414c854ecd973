"""Every expression of the dashboards and alerts, asked of a Prometheus that scrapes a cluster under load.

Each panel must have data, but for those of what did not happen, which are named below.
"""

import glob
import http.client
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from cluster import Cluster, free_ports, get, on_loopback  # noqa: E402

QUORATE = os.environ["QUORATE"]
REPLICAS = 3
ENGINES = 2
# Seconds of load before the leader is killed, and after.
LOAD = 25
# Expressions without data here: nothing of the kind happened, and their series begin with the first time.
MAY_BE_EMPTY = ["quorate_admission_refused_total", "quorate_route_filtered_total", 'outcome!="finished"']


class MonitoredCluster(Cluster):
    """Three replicas, engines with KV events, a Prometheus that scrapes the replicas."""

    def __init__(self, folder):
        super().__init__(QUORATE, folder, on_loopback(REPLICAS))
        *ports, self.prometheus = free_ports(3 * ENGINES + 1)
        for nth in range(ENGINES):
            listen, events, replay = (f"127.0.0.1:{port}" for port in ports[3 * nth : 3 * nth + 3])
            events, replay = f"tcp://{events}", f"tcp://{replay}"
            flags = ["--speed", "20", "--kv-events", events, "--kv-replay", replay]
            self.add_engine(listen, *flags, kv_events=events, kv_replay=replay)
        # A limit, so that requests wait.
        self.configure("admission.concurrency = 2", '[[models]]\nname = "*"\ntokenizer = "engine"\n')
        self.is_over = threading.Event()

    def start_prometheus(self):
        targets = json.dumps([admin for _, admin, _ in self.replicas])
        with open(f"{self.folder}/prometheus.yml", "w", encoding="utf-8") as config:
            config.write(
                "global: { scrape_interval: 1s, evaluation_interval: 1s }\n"
                f"rule_files: [{HERE}/../kubernetes/helm/quorate/files/alerts.yaml]\n"
                f"scrape_configs: [{{ job_name: quorate, static_configs: [{{ targets: {targets} }}] }}]\n"
            )
        self.start("prometheus", "prometheus", f"--config.file={self.folder}/prometheus.yml",
                   f"--storage.tsdb.path={self.folder}/series",
                   f"--web.listen-address=127.0.0.1:{self.prometheus}")  # fmt: skip
        self.until("Prometheus is ready", lambda: get(f"http://127.0.0.1:{self.prometheus}/-/ready"))

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
                f"http://{data}/v1/chat/completions",
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
                if json.loads(get(f"http://{admin}/admin/v1/cluster"))["role"] == "leader":
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
        super().stop()


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
        cluster = MonitoredCluster(folder)
        try:
            run(cluster)
        finally:
            cluster.stop()


def run(cluster):
    cluster.start_replicas()
    cluster.start_prometheus()
    clients = [threading.Thread(target=cluster.client, args=(nth,), daemon=True) for nth in range(8)]
    for client in clients:
        client.start()
    time.sleep(LOAD)
    leader = cluster.leader()
    cluster.processes[f"replica-{leader}"].kill()
    cluster.until("another replica leads", lambda: cluster.leader() != leader)
    time.sleep(15)
    fired = {each["metric"]["alertname"] for each in cluster.query('ALERTS{alertstate=~"firing|pending"}')}
    if not {"QuorateReplicaDown", "QuorateQuorumAtRisk"} <= fired:
        sys.exit(f"a replica is down, and these alerts know it: {sorted(fired)}")
    cluster.start_replica(leader)
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
