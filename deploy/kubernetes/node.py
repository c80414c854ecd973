"""A node of Kubernetes: runs the pods that the API server has, as a kubelet does.

Every container runs the program in a root of its own (an overlay of this machine's), in a network namespace with
the pod's address, as the user of its security context, with its environment and volumes, and the token and the
authority of its service account. Probes, graceful ends, restarts and volumes that outlive their pod are Kubernetes'.
"""

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

from api import HOST, PORT

NAME = "node-1"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
POLL_S = 0.3


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Pod:
    """A pod that runs here."""

    def __init__(self, node, number, rendered):
        self.node, self.rendered = node, rendered
        self.name, self.uid = rendered["metadata"]["name"], rendered["metadata"]["uid"]
        (self.container,) = rendered["spec"]["containers"]
        self.address = f"10.88.{1 + number // 250}.{1 + number % 250}"
        self.network = f"pod{number}"
        self.folder = node.folder / f"pods/{number}-{self.name}"
        self.process, self.restarts, self.is_ready = None, 0, False
        self.ends_by = None
        self.add_network(number)

    def add_network(self, number):
        ip("netns", "add", self.network)
        ip("link", "add", f"v{number}", "type", "veth", "peer", "eth0", "netns", self.network)
        ip("link", "set", f"v{number}", "master", "pods", "up")
        ip("-n", self.network, "link", "set", "lo", "up")
        ip("-n", self.network, "address", "add", f"{self.address}/16", "dev", "eth0")
        ip("-n", self.network, "link", "set", "eth0", "up")

    def path(self):
        return f"/api/v1/namespaces/{self.node.namespace}/pods/{self.name}"

    def volumes(self):
        """Makes the folders of the volumes; returns them by name."""
        folders = {}
        for volume in self.rendered["spec"].get("volumes", []):
            folder = self.folder / "volumes" / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            folders[volume["name"]] = folder
            api, namespace = self.node.api, self.node.namespace
            if "configMap" in volume:
                path = f"/api/v1/namespaces/{namespace}/configmaps/{volume['configMap']['name']}"
                for file, text in api.get(path)["data"].items():
                    (folder / file).write_text(text)
            elif "secret" in volume:
                path = f"/api/v1/namespaces/{namespace}/secrets/{volume['secret']['secretName']}"
                for file, text in api.get(path)["data"].items():
                    with contextlib.suppress(FileNotFoundError):
                        (folder / file).unlink()
                    (folder / file).write_bytes(base64.b64decode(text))
                    (folder / file).chmod(volume["secret"].get("defaultMode", 0o644))
            elif "persistentVolumeClaim" in volume:
                folders[volume["name"]] = self.node.claim(volume["persistentVolumeClaim"]["claimName"])
        group = self.rendered["spec"].get("securityContext", {}).get("fsGroup")
        for folder in folders.values():
            for each in [folder, *folder.rglob("*")]:
                if group and each.stat().st_gid != group:
                    os.chown(each, -1, group)
            if group:
                folder.chmod(0o2775)
        return folders

    def account(self):
        """Writes what a pod shows to the API server; returns the folder."""
        folder = self.folder / "account"
        folder.mkdir(parents=True, exist_ok=True)
        name = self.rendered["spec"]["serviceAccountName"]
        path = f"/api/v1/namespaces/{self.node.namespace}/serviceaccounts/{name}/token"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid}
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        asked |= {"spec": {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound}}
        made = self.node.api.call("POST", path, asked)
        (folder / "token").write_text(made["status"]["token"])
        (folder / "namespace").write_text(self.node.namespace)
        shutil.copy(self.node.api.authority(), folder / "ca.crt")
        return folder

    def environment(self):
        values = {"POD_IP": self.address}
        chosen = {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(PORT), "PATH": "/usr/bin:/bin"}
        for each in self.container.get("env", []):
            if "valueFrom" in each:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
                value = self.address
            else:
                value = each.get("value", "").replace("$(POD_IP)", values["POD_IP"])
            chosen[each["name"]] = value
        return chosen

    def start(self):
        """Starts the container."""
        root = self.folder / f"root-{self.restarts}"
        for part in ["upper", "work", "merged"]:
            (root / part).mkdir(parents=True, exist_ok=True)
        folders = self.volumes()
        mounts = [(folders[each["name"]], each["mountPath"]) for each in self.container.get("volumeMounts", [])]
        if self.rendered["spec"].get("serviceAccountName"):
            mounts.append((self.account(), ACCOUNT))
        user = self.rendered["spec"].get("securityContext", {}).get("runAsUser", 65534)
        merged = root / "merged"
        lines = [
            "set -e",
            f"hostname {self.name}",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/upper,workdir={root}/work {merged}",
            f"mount -t tmpfs run {merged}/run",
            f"mount --rbind /proc {merged}/proc",
            f"mount --rbind /dev {merged}/dev",
            f"touch {merged}/run/quorate-program && mount --bind {self.node.program} {merged}/run/quorate-program",
            f"rm -f {merged}/etc/resolv.conf && echo 'nameserver {HOST}' >{merged}/etc/resolv.conf",
            f"echo 'search {self.node.namespace}.svc.cluster.local svc.cluster.local' >>{merged}/etc/resolv.conf",
        ]
        for source, target in mounts:
            # An absolute link would lead out of the root.
            target = re.sub("^/var/run/", "/run/", target)
            lines += [f"mkdir -p {merged}{target}", f"mount --bind {source} {merged}{target}"]
        words = [f"{key}={value}" for key, value in self.environment().items()]
        lines.append(
            f"exec chroot {merged} setpriv --reuid {user} --regid {user} --groups {user} --no-new-privs "
            'env -i "$@"'
        )
        command = ["ip", "netns", "exec", self.network, "unshare", "--mount", "--uts"]
        command += ["bash", "-c", "\n".join(lines), "bash", *words]
        command += ["/run/quorate-program", *self.container.get("args", [])]
        log = open(self.node.folder / f"{self.name}.log", "ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.report()

    def report(self):
        """Writes the pod's status."""
        ready = "True" if self.is_ready else "False"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        container = {"name": self.container["name"], "ready": self.is_ready, "restartCount": self.restarts}
        container |= {"image": self.container["image"], "imageID": "", "state": {"running": {"startedAt": now}}}
        conditions = [
            {"type": kind, "status": status, "lastTransitionTime": now}
            for kind, status in [("Ready", ready), ("ContainersReady", ready), ("Initialized", "True")]
        ]
        status = {"phase": "Running", "podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": HOST}
        status |= {"startTime": now, "conditions": conditions, "containerStatuses": [container]}
        self.node.api.patch(f"{self.path()}/status", {"status": status})

    def probe(self):
        """Asks the readiness probe once; writes what changed."""
        asked = self.container.get("readinessProbe", {}).get("httpGet")
        is_ready = self.process.poll() is None
        if asked and is_ready:
            ports = {each.get("name"): each["containerPort"] for each in self.container.get("ports", [])}
            url = f"http://{self.address}:{ports.get(asked['port'], asked['port'])}{asked['path']}"
            try:
                with urllib.request.urlopen(url, timeout=2):
                    pass
            except OSError:
                is_ready = False
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self.report()

    def kill(self, what):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(what)

    def step(self, now):
        """Brings the pod to what the API server wants; False once it is gone."""
        wanted = self.node.wanted.get(self.uid)
        if wanted is None or wanted["metadata"].get("deletionTimestamp"):
            return self.end(now, wanted)
        if self.process is None:
            self.start()
        elif self.process.poll() is not None:
            self.restarts += 1
            self.is_ready = False
            self.start()
        else:
            self.probe()
        return True

    def end(self, now, wanted):
        if self.process and self.process.poll() is None:
            if self.ends_by is None:
                grace_s = (wanted or {}).get("metadata", {}).get("deletionGracePeriodSeconds", 0)
                self.ends_by = now + grace_s
                self.kill(signal.SIGTERM if wanted else signal.SIGKILL)
            elif now > self.ends_by:
                self.kill(signal.SIGKILL)
            elif wanted:
                self.probe()
            return True
        if wanted:
            self.node.api.delete(self.path(), {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})
        ip("netns", "delete", self.network)
        return False


class Node:
    """Runs the pods of a namespace, and answers for the names of its headless Services."""

    def __init__(self, api, namespace, program, folder):
        self.api, self.namespace, self.program, self.folder = api, namespace, program, folder
        self.pods, self.wanted, self.count, self.lost = {}, {}, 0, []
        self.is_over = threading.Event()
        self.hosts = folder / "hosts"
        self.hosts.mkdir()
        self.addresses = {}

    def start(self):
        ip("link", "set", "lo", "up")
        ip("link", "add", "pods", "type", "bridge")
        ip("address", "add", f"{HOST}/16", "dev", "pods")
        ip("link", "set", "pods", "up")
        log = open(self.folder / "dnsmasq.log", "ab")
        options = ["--keep-in-foreground", "--no-resolv", "--no-hosts", f"--addn-hosts={self.hosts}", "--user=root"]
        options += [f"--listen-address={HOST}", "--bind-interfaces", "--local-ttl=1", "--log-facility=-", "--pid-file="]
        self.names = subprocess.Popen(["dnsmasq", *options], stdout=log, stderr=log)

    def run(self):
        self.worker = threading.Thread(target=self.loop, daemon=True)
        self.worker.start()

    def claim(self, name):
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def loop(self):
        while not self.is_over.is_set():
            try:
                self.step()
            except (OSError, RuntimeError, TypeError, KeyError) as error:
                # The API server may be away: pods run on.
                self.lost.append(repr(error))
            time.sleep(POLL_S)

    def step(self):
        listed = self.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        self.wanted = {each["metadata"]["uid"]: each for each in listed}
        for uid, rendered in self.wanted.items():
            if uid in self.pods:
                continue
            if not rendered["spec"].get("nodeName"):
                name = rendered["metadata"]["name"]
                target = {"apiVersion": "v1", "kind": "Node", "name": NAME}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding"
                self.api.call("POST", path, binding)
            self.pods[uid] = Pod(self, self.count, rendered)
            self.count += 1
        now = time.monotonic()
        for uid, pod in list(self.pods.items()):
            if not pod.step(now):
                del self.pods[uid]
        self.publish()

    def publish(self):
        """Writes the addresses of the Services, as cluster DNS has them."""
        for endpoints in self.api.get(f"/api/v1/namespaces/{self.namespace}/endpoints")["items"]:
            name, found = endpoints["metadata"]["name"], []
            service = self.api.get(f"/api/v1/namespaces/{self.namespace}/services/{name}")
            unready = service and service["spec"].get("publishNotReadyAddresses")
            for subset in endpoints.get("subsets") or []:
                found += subset.get("addresses", [])
                found += subset.get("notReadyAddresses", []) if unready else []
            addresses = sorted({each["ip"] for each in found})
            if self.addresses.get(name) != addresses:
                self.addresses[name] = addresses
                full = f"{name}.{self.namespace}.svc.cluster.local"
                (self.hosts / name).write_text("".join(f"{each} {full}\n" for each in addresses))
                self.names.send_signal(signal.SIGHUP)

    def pod(self, name):
        (found,) = [each for each in self.pods.values() if each.name == name]
        return found

    def stop(self):
        self.is_over.set()
        for pod in self.pods.values():
            if pod.process:
                pod.kill(signal.SIGKILL)
                pod.process.wait()
        self.names.kill()
