"""Envoy with Quorate's picker, as the shipped example configures it."""

import re

from programs import free_ports
from subjects import Subject, envoy_process, wait_until_it_answers

FULL_DUPLEX = "full duplex"
# Changes of the example's body modes, by name.
MODES = {
    FULL_DUPLEX: {},
    "buffered, streamed": {
        "request_body_mode: FULL_DUPLEX_STREAMED": "request_body_mode: BUFFERED",
        "response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: STREAMED",
    },
}
# Settings of the example that a race does without: an access log, and TLS to the picker.
ACCESS_LOG = re.compile(r"^ +access_log:\n.*?(?=^ +http_filters:)", re.M | re.S)
TLS = re.compile(r"^ +transport_socket:\n.*?(?=^ +load_assignment:)", re.M | re.S)
PICKER = re.compile(r"^ +- endpoint: .*10\.77\.0\.\d+.*\n", re.M)


def picker_settings(port):
    """Returns the settings of a replica whose picker is at `port`, for this Envoy."""
    return [
        f"listen.picker=127.0.0.1:{port}",
        "tls.picker.in_the_clear=true",
        "picker.endpoints=1",
    ]


def start_gateway(stage, picker, mode=FULL_DUPLEX):
    """Starts Envoy with one worker before the picker at the port `picker`. Returns `None` if Envoy
    is not installed."""
    (port,) = free_ports(1)
    config = (stage.args.here.parents[2] / "deploy/gateways/envoy.yaml").read_text()
    config = ACCESS_LOG.sub("", TLS.sub("", config))
    first = PICKER.search(config).group(0).replace("10.77.0.11", "127.0.0.1").replace("9002", str(picker))
    config = PICKER.sub("", config) + first
    changes = {"address: 0.0.0.0, port_value: 80 ": f"address: 127.0.0.1, port_value: {port} "}
    for old, new in (changes | MODES[mode]).items():
        assert old in config, f"deploy/gateways/envoy.yaml no longer has {old}"
        config = config.replace(old, new)
    process = envoy_process(stage, f"gateway-{mode.replace(', ', '-').replace(' ', '-')}", config)
    if process is None:
        return None
    subject = Subject(f"Envoy and picker, {mode}", port, [process])
    wait_until_it_answers(subject)
    return subject
