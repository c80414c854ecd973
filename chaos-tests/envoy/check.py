"""A real Envoy in front of the pickers and data ports of three replicas, with the shipped examples.

`check.py QUORATE ENVOY [PART...]`; needs PyYAML. `.ci/run gateway` is this. Prints what held, and exits with 1 if
something did not.
"""

import sys
import tempfile

import deaths
import replies
import shared
import table
from http1 import Spy
from stand import Failed, Stand, free_ports

SETTINGS = """
picker.endpoints = 1
users.expose = "full"
drain.dns_ttl = "2s"
# Unhurried, as a busy machine runs all of this.
cluster.heartbeat = "200ms"
cluster.election_timeout = "1s..2s"
routing.min_index_wait = "2s"
"""


def started(stand):
    """Starts the engines and replicas; the spies among the engines."""
    stand.start_engines()
    plain, named, below = free_ports(3)
    spies = [Spy(plain), Spy(named), Spy(below, "/below")]
    stand.engines["spy"] = {"id": "spy", "url": f"http://127.0.0.1:{plain}"}
    stand.engines["named"] = {"id": "named", "url": f"http://localhost:{named}", "models": ["named"]}
    stand.engines["below"] = {"id": "below", "url": f"http://127.0.0.1:{below}/below", "models": ["below"]}
    stand.configure(SETTINGS)
    stand.start_replicas()
    for nth in range(len(table.MODES)):
        limit(stand, f"limited-mode{nth}")
    limit(stand, "limited-data-port")
    models = {"emulated", "spy", "named", "below"}
    for data, *_ in stand.replicas:
        stand.until("all models are known", lambda data=data: models <= set(stand.models(data)))
    return spies


def limit(stand, user):
    """Lets a user send one request an hour."""
    stand.admin(1, f"/admin/v1/users/{user}", {"limits": {"requests": 1, "window": "1h"}})


PARTS = {
    "table": table.run,
    "filters": replies.before,
    "circuits": replies.instead,
    "shared": shared.run,
    "pickers": deaths.pickers,
    "data-ports": deaths.ports,
}


def main():
    binary, envoy, *parts = sys.argv[1:]
    failed = []
    prefix = "quorate-gateway-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, Stand(binary, envoy, folder) as stand:
        spies = started(stand)
        for name in parts or PARTS:
            try:
                PARTS[name](stand, spies)
            except Failed as why:
                failed.append(name)
                print(f"{name}: {why}", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


main()
