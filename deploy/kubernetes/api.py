"""Kubernetes' control plane as processes, and a client of its API."""

import json
import pathlib
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request

HOST = "10.88.0.1"
PORT = 6443
SERVICES = "10.99.0.0/16"
# `--controllers`: what turns StatefulSets and Deployments into pods, and Services into addresses. Those that watch
# over nodes are left out, as the one node here has no kubelet that reports.
CONTROLLERS = "statefulset,deployment,replicaset,endpoint,serviceaccount,serviceaccount-token,disruption"
# Collections by kind, in the group that the object's `apiVersion` names.
COLLECTIONS = {
    "NetworkPolicy": "networkpolicies",
    "InferencePool": "inferencepools",
    "Endpoints": "endpoints",
}


class ControlPlane:
    """etcd, kube-apiserver and kube-controller-manager, whose data and logs are in a folder."""

    def __init__(self, programs, folder):
        self.programs, self.folder = pathlib.Path(programs), pathlib.Path(folder)
        self.processes = {}
        self.token = secrets.token_hex(16)
        # Kubernetes' own administrators.
        (self.folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        key = self.folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)

    def start(self):
        self.run("etcd", "--data-dir", self.folder / "etcd", "--log-level", "warn")
        self.start_api_server()
        self.start_controllers()

    def start_api_server(self):
        """Starts the API server, and waits until it takes requests."""
        key = self.folder / "service-accounts.key"
        self.run(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--bind-address={HOST}",
            f"--advertise-address={HOST}",
            f"--secure-port={PORT}",
            f"--cert-dir={self.folder}/certificates",
            f"--service-cluster-ip-range={SERVICES}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--api-audiences=https://kubernetes.default.svc",
            # The node gives a pod its account's token; this would mount a Secret for it.
            "--disable-admission-plugins=ServiceAccount",
            "--event-ttl=10m",
        )
        wait_for("the API server takes requests", lambda: self.call("GET", "/readyz", is_json=False) == "ok")

    def start_controllers(self):
        kubeconfig = self.folder / "kubeconfig"
        user = {"name": "admin", "user": {"token": self.token}}
        cluster = {"server": f"https://{HOST}:{PORT}", "certificate-authority": str(self.authority())}
        context = {"name": "here", "context": {"cluster": "here", "user": "admin"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "users": [user]}
        config |= {"clusters": [{"name": "here", "cluster": cluster}], "contexts": [context]}
        kubeconfig.write_text(json.dumps(config))
        self.run(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--controllers={CONTROLLERS}",
            f"--service-account-private-key-file={self.folder}/service-accounts.key",
            f"--root-ca-file={self.authority()}",
            "--leader-elect=false",
        )

    def run(self, name, *arguments):
        log = open(self.folder / f"{name}.log", "ab")
        self.processes[name] = subprocess.Popen([self.programs / name, *arguments], stdout=log, stderr=log)

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self):
        for name in list(self.processes):
            self.kill(name)

    def authority(self):
        """The file with the certificate of the API server and its authority's."""
        return self.folder / "certificates/apiserver.crt"

    def call(self, method, path, body=None, is_json=True, content="application/json"):
        """Sends a request, and returns the answer; None if the object does not exist."""
        request = urllib.request.Request(f"https://{HOST}:{PORT}{path}", method=method)
        request.add_header("authorization", f"Bearer {self.token}")
        if body is not None:
            request.add_header("content-type", content)
            request.data = json.dumps(body).encode()
        trust = ssl.create_default_context(cafile=str(self.authority()))
        try:
            with urllib.request.urlopen(request, timeout=10, context=trust) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise RuntimeError(f"{method} {path}: {error}: {error.read().decode(errors='replace')}") from error
        return json.loads(text) if is_json else text

    def create(self, namespace, rendered):
        """Creates an object as `kubectl create` does."""
        made = self.call("POST", collection(namespace, rendered["apiVersion"], rendered["kind"]), rendered)
        assert made, f"the API has no {rendered['kind']} of {rendered['apiVersion']}"
        return made

    def get(self, path):
        return self.call("GET", path)

    def patch(self, path, change):
        return self.call("PATCH", path, change, content="application/merge-patch+json")

    def delete(self, path, options=None):
        return self.call("DELETE", path, options or {})


def collection(namespace, version, kind):
    """The path of a collection."""
    prefix = "/api/" if "/" not in version else "/apis/"
    name = COLLECTIONS.get(kind, f"{kind.lower()}s")
    is_global = kind in ["Namespace", "CustomResourceDefinition", "Node", "PriorityClass"]
    inside = "" if is_global else f"/namespaces/{namespace}"
    return f"{prefix}{version}{inside}/{name}"


def wait_for(what, is_met, limit_s=120):
    """Waits for a condition."""
    end, last = time.monotonic() + limit_s, None
    while time.monotonic() < end:
        try:
            if is_met():
                return
            last = None
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            last = error
        time.sleep(0.2)
    raise TimeoutError(f"not within {limit_s} s: {what}; {last!r}")
