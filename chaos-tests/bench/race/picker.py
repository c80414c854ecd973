"""Costs of a request through a gateway that asks the picker, beside those at the data port."""

import statistics

from gateway import MODES, picker_settings, start_gateway
from loads import SIZES
from programs import Stage, free_ports
from races import CONNECTIONS, beside, kept_connections, table
from subjects import Subject, start_engines, start_envoy, start_nginx, start_replicas


def picker(args):
    """Envoy that asks a picker, beside the data port and Envoy alone: CPU time of Envoy and replica."""
    with Stage(args) as stage:
        engines = start_engines(stage)
        (port,) = free_ports(1)
        (replica,) = start_replicas(stage, engines, 1, settings=picker_settings(port))
        alone = start_envoy(stage, engines)
        if alone is None:
            return
        nginx = start_nginx(stage, engines)
        data_port = Subject("data port", replica.port, [replica.process])
        gateways = [start_gateway(stage, port, mode) for mode in MODES]
        # The processes of each subject that are not Envoy, and those that are.
        parts = {nginx: (nginx.processes, []), data_port: ([replica.process], [])}
        parts |= {envoy: ([replica.process], envoy.processes) for envoy in [alone, *gateways]}
        cases = kept_connections(stage, counts=(CONNECTIONS,))
        figures = measure_parts(args, parts, cases)
        for size in SIZES:
            case = size, CONNECTIONS
            of_nginx, of_data_port = (sum(figures[case, it]) for it in (nginx, data_port))
            rows = []
            for subject in parts:
                own, of_envoy = figures[case, subject]
                cells = [beside(own + of_envoy, of_nginx), f"{of_envoy:.1f}", beside(own, of_data_port)]
                rows.append([subject.name, *cells])
            head = ["CPU us a request (times nginx)", "of it Envoy's", "the rest (times the data port)"]
            table([f"{size}, {CONNECTIONS} connections", *head], rows)


def measure_parts(args, parts, cases):
    """Returns the median CPU times per request of both parts of each subject, by (case, subject)."""
    rows = {}
    for round_ in range(args.rounds + 1):
        for case, load in cases.items():
            for subject, groups in parts.items():
                before = [cpu_us(group) for group in groups]
                told = load(subject, args.seconds if round_ else 1)
                taken = [cpu_us(group) - was for group, was in zip(groups, before)]
                if round_:  # The first round is a warm-up.
                    rows.setdefault((case, subject), []).append([it / told.requests for it in taken])
    return {key: [statistics.median(column) for column in zip(*found)] for key, found in rows.items()}


def cpu_us(processes):
    return sum(process.cpu_us() for process in processes)
