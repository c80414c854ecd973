"""Every expression of the dashboards and alerts, asked of a Prometheus that scrapes a cluster under load.

Each panel must have data, but for those of what did not happen, which are named below. Prometheus must have
evaluated each alert, and know every metric that one asks for. What replicas show passes `promtool check metrics`.
Before that: each alert is in both copies of the rules, is in the runbook, has a test in which it fires, and a
quiet hour that has all its metrics.
"""

import glob
import http.client
import json
import os
import re
import subprocess
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
RULES = f"{HERE}/../kubernetes/helm/quorate/files/alerts.yaml"
REPLICAS = 3
ENGINES = 2
# Seconds of load before the leader is killed, and after.
LOAD = 25
# Expressions without data here: nothing of the kind happened, and their series begin with the first time.
MAY_BE_EMPTY = ["quorate_admission_refused_total", "quorate_route_filtered_total", 'outcome!="finished"']
# Metrics of alerts without series here: no listener has TLS, and no model is in panic.
MAY_HAVE_NO_SERIES = {"quorate_tls_certificate_expiry_seconds", "quorate_route_panic"}


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
        # A limit, so that requests wait, and a source without engines, as alerts ask for one.
        engines = f"{folder}/engines.json"
        with open(engines, "w", encoding="utf-8") as file:
            file.write("[]")
        settings = 'admission.concurrency = 2\n'
        source = f'[[discovery]]\nid = "rack"\nkind = "file"\npath = "{engines}"\n'
        self.configure(settings, '[[models]]\nname = "*"\ntokenizer = "engine"\n' + source)
        self.is_over = threading.Event()

    def start_prometheus(self):
        targets = json.dumps([admin for _, admin, _ in self.replicas])
        with open(f"{self.folder}/prometheus.yml", "w", encoding="utf-8") as config:
            config.write(
                "global: { scrape_interval: 1s, evaluation_interval: 1s }\n"
                f"rule_files: [{RULES}]\n"
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

    def ask(self, path):
        return json.loads(get(f"http://127.0.0.1:{self.prometheus}/api/v1/{path}"))["data"]

    def query(self, expression):
        query = urllib.parse.urlencode({"query": expression})
        try:
            return self.ask(f"query?{query}")["result"]
        except urllib.error.HTTPError as error:
            sys.exit(f"{expression}: {error.read().decode()}")

    def has_data(self, expression):
        """Whether a number is among the results: a quotient of nothing by nothing says as much as no result."""
        return any(each["value"][1] != "NaN" for each in self.query(expression))

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


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def metrics_of(expression):
    return set(re.findall(r"\b(?:quorate|process)_[a-z_]+|\bup\b", expression))


def alerts():
    """Name and expression of each alert."""
    return re.findall(r"- alert: (\w+)\n +expr: (.+)", read(RULES))


def panels_are_known():
    """What panels ask for is what the reference lists."""
    known = set(re.findall(r"^\| `([a-z_]+)`", read(f"{HERE}/../../docs/reference/metrics.md"), re.M))
    ending = re.compile("_(bucket|sum|count)$")
    for title, expression in panels():
        for name in metrics_of(expression):
            if name not in known and ending.sub("", name) not in known:
                sys.exit(f"{title}: {name} is not in docs/reference/metrics.md")


def alerts_are_complete():
    """Each alert is documented and tested."""
    runbook = read(f"{HERE}/../../docs/guide/runbook.md")
    tests, quiet = read(f"{HERE}/alerts.test.yaml").split("- name: a quiet hour", 1)
    firing = re.compile(r'alertname="(\w+)",alertstate="firing".*\n.*\n +exp_samples: \[\{ value: 1 \}\]')
    fires = set(firing.findall(tests))
    for alert, expression in alerts():
        if f"### {alert}\n" not in runbook:
            sys.exit(f"{alert} is not in docs/guide/runbook.md")
        if alert not in fires:
            sys.exit(f"{alert} fires in no test of alerts.test.yaml")
        for metric in metrics_of(expression):
            if f"'{metric}{{" not in quiet:
                sys.exit(f"the quiet hour of alerts.test.yaml has no {metric}, which {alert} asks for")


def main():
    panels_are_known()
    alerts_are_complete()
    with tempfile.TemporaryDirectory() as folder, MonitoredCluster(folder) as cluster:
        run(cluster)


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
    check_panels(cluster)
    check_alerts(cluster)
    check_pages(cluster)
    print(f"alerts while the leader was down: {sorted(fired)}")


def check_panels(cluster):
    """Every panel has data."""
    empty, asked = [], 0
    for title, expression in panels():
        asked += 1
        if not cluster.has_data(expression) and not any(part in expression for part in MAY_BE_EMPTY):
            empty.append(f"{title}: {expression}")
    if empty:
        sys.exit("without data:\n" + "\n".join(empty))
    print(f"dashboards: {asked} expressions, all with data after the leader was killed")


def check_alerts(cluster):
    """Prometheus has evaluated every alert without a fault, and has what it asks for."""
    (group,) = cluster.ask("rules")["groups"]
    expected = alerts()
    faults = [f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}" for rule in group["rules"]
              if rule["health"] != "ok"]  # fmt: skip
    if faults or sorted(rule["name"] for rule in group["rules"]) != sorted(name for name, _ in expected):
        sys.exit("alerts that Prometheus could not evaluate:\n" + "\n".join(faults))
    for alert, expression in expected:
        for metric in metrics_of(expression) - MAY_HAVE_NO_SERIES:
            if not cluster.has_data(metric):
                sys.exit(f"{alert} asks for {metric}, which no replica shows")
    print(f"alerts: {len(expected)} evaluated by Prometheus, with what they ask for")


def check_pages(cluster):
    """What each replica shows under load is as Prometheus wants it."""
    for _, admin, _ in cluster.replicas:
        page = get(f"http://{admin}/metrics")
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
        if done.returncode != 0 or done.stdout or done.stderr:
            sys.exit(f"promtool check metrics: {done.stdout.decode()}{done.stderr.decode()}")
    print(f"metrics: the pages of {len(cluster.replicas)} replicas pass promtool check metrics")


main()
