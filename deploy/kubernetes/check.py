"""Compares what the chart and Kustomize render, and holds it to the API's schemas and to quorate's own."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib

import jsonschema
import kubernetes_validate
import yaml

FOLDER, QUORATE = sys.argv[1:]
HERE = os.path.dirname(os.path.abspath(__file__))
VERSIONS = ["1.27.0", "1.31.0", "1.34.0"]
# What only Helm writes.
OF_HELM = ["app.kubernetes.io/managed-by", "helm.sh/chart"]
# Kinds of operators, whose schemas are not the API's.
FOREIGN = ["Certificate", "PrometheusRule", "ServiceMonitor"]
# Kinds whose schemas are in schemas/gateway.yaml.
OF_GATEWAYS = ["DestinationRule", "EnvoyFilter", "Gateway", "GatewayClass", "HTTPRoute", "InferencePool"]
# Folders of gateways/ with what one gateway needs.
GATEWAYS = ["agentgateway", "envoy-gateway", "istio"]


def objects(name):
    """What was rendered, by kind and name."""
    found = {}
    with open(f"{FOLDER}/{name}.yaml", encoding="utf-8") as file:
        for rendered in filter(None, yaml.safe_load_all(file)):
            metadata = rendered["metadata"]
            for label in OF_HELM:
                metadata.get("labels", {}).pop(label, None)
            if rendered["kind"] != "GatewayClass":
                metadata.pop("namespace", None)
            key = rendered["kind"], metadata["name"]
            assert key not in found, f"{name}: {key} twice"
            found[key] = rendered
    return found


def difference(path, ours, theirs):
    """Where two values differ first."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                return difference(f"{path}.{key}", ours.get(key), theirs.get(key))
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, (one, other) in enumerate(zip(ours, theirs)):
            if one != other:
                return difference(f"{path}[{at}]", one, other)
    return f"{path}: Kustomize has {ours!r}, the chart {theirs!r}"


def alike(name):
    """Both render the same."""
    ours, theirs = objects(f"{name}.kustomize"), objects(f"{name}.helm")
    assert ours.keys() == theirs.keys(), f"{name}: {ours.keys() ^ theirs.keys()}"
    for key, rendered in ours.items():
        if rendered != theirs[key]:
            sys.exit(difference(f"{name}: {key[0]} {key[1]}", rendered, theirs[key]))
    print(f"{name}: {len(ours)} objects, the same from Kustomize and from the chart")
    return ours


def valid(name, rendered):
    """The API takes them."""
    checked = [one for (kind, _), one in rendered.items() if kind not in [*FOREIGN, *OF_GATEWAYS]]
    for version in VERSIONS:
        for one in checked:
            kubernetes_validate.validate(one, version, strict=True)
    of_gateways = [one for (kind, _), one in rendered.items() if kind in OF_GATEWAYS]
    with open(f"{HERE}/schemas/gateway.yaml", encoding="utf-8") as file:
        schemas = yaml.safe_load(file)
    for one in of_gateways:
        jsonschema.validate(one, schemas[one["kind"]])
    left = len(rendered) - len(checked) - len(of_gateways)
    print(f"{name}: {len(checked)} fit the schemas of {', '.join(VERSIONS)}; {left} are of operators")
    if of_gateways:
        print(f"{name}: {len(of_gateways)} fit schemas/gateway.yaml")


def picks(rendered):
    """A gateway that follows the pool comes to the picker, and the picker to the pool's engines."""
    route, pool = rendered["HTTPRoute", "engines"], rendered["InferencePool", "engines"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    asked = pool["spec"]["endpointPickerRef"]
    (port,) = rendered["Service", asked["name"]]["spec"]["ports"]
    assert port["port"] == asked["port"]["number"] and port["appProtocol"] == "http2"
    (container,) = rendered["StatefulSet", "quorate"]["spec"]["template"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["QUORATE_LISTEN__PICKER"] == f"0.0.0.0:{ports[port['targetPort']]}"
    ingress = rendered["NetworkPolicy", "quorate"]["spec"]["ingress"]
    assert any(one["port"] == port["targetPort"] for rule in ingress for one in rule["ports"])
    config = tomllib.loads(rendered["ConfigMap", "quorate"]["data"]["quorate.toml"])
    (source,) = config["discovery"]
    assert source["inference_pool"] == pool["metadata"]["name"]
    print("gateway: route, pool, Service, port and discovery lead to each other")


def for_one(name, plain):
    """What one gateway needs is there, beside what all do."""
    rendered = objects(f"{name}.kustomize")
    valid(name, rendered)
    config(name, rendered)
    picks(rendered)
    assert plain.keys() <= rendered.keys()
    changed = {key for key in plain if plain[key] != rendered[key]}
    gateway = rendered["Gateway", "inference-gateway"]
    (parent,) = rendered["HTTPRoute", "engines"]["spec"]["parentRefs"]
    assert parent["name"] == gateway["metadata"]["name"]
    assert gateway["spec"]["gatewayClassName"] == name
    more = rendered.keys() - plain.keys() - {("Gateway", "inference-gateway")}
    pool = rendered["InferencePool", "engines"]
    picker = pool["spec"]["endpointPickerRef"]["name"]
    (container,) = rendered["StatefulSet", "quorate"]["spec"]["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    if name == "istio":
        assert more == {("DestinationRule", picker), ("EnvoyFilter", picker)} and not changed
        rule = rendered["DestinationRule", picker]["spec"]
        assert rule["host"] == f"{picker}.llm.svc.cluster.local"
        as_in_the_example(rendered["EnvoyFilter", picker]["spec"], rule["host"], pool, gateway)
    elif name == "envoy-gateway":
        assert more == {("GatewayClass", name)} and changed == {("StatefulSet", "quorate")}
        assert values["QUORATE_PICKER__ENDPOINTS"] == "1"
        with open(f"{HERE}/gateways/{name}/values.yaml", encoding="utf-8") as file:
            manager = yaml.safe_load(file)["config"]["envoyGateway"]["extensionManager"]
        (followed,) = manager["backendResources"]
        assert pool["apiVersion"] == f"{followed['group']}/{followed['version']}"
        assert pool["kind"] == followed["kind"]
    else:
        assert not more and not changed
    print(f"{name}: a gateway of its class, its route, and what else it needs")


def as_in_the_example(spec, host, pool, gateway):
    """Istio's Envoy uses the pickers as the example does, which a real one runs."""
    with open(f"{HERE}/../gateways/envoy.yaml", encoding="utf-8") as file:
        example = yaml.safe_load(file)["static_resources"]
    (target,) = spec["targetRefs"]
    assert target["name"] == gateway["metadata"]["name"]
    cluster, ext_proc = spec["configPatches"]
    port = pool["spec"]["endpointPickerRef"]["port"]["number"]
    assert cluster["match"]["cluster"] == {"service": host, "portNumber": port}
    (pickers,) = [one for one in example["clusters"] if one["name"] == "pickers"]
    # Istio has addresses, TLS and the balancing from elsewhere.
    elsewhere = ["name", "type", "lb_policy", "connect_timeout", "transport_socket", "load_assignment"]
    wanted = {key: value for key, value in pickers.items() if key not in elsewhere}
    assert cluster["patch"]["value"] == wanted
    (listener,) = example["listeners"]
    (connections,) = listener["filter_chains"][0]["filters"]
    shipped = connections["typed_config"]["http_filters"][0]
    value = ext_proc["patch"]["value"]
    assert value["name"] == ext_proc["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"]
    assert value["name"] == shipped["name"]
    # ... as the modes of bodies, and the name of the cluster.
    elsewhere = ["processing_mode", "metadata_options"]
    wanted = {key: value for key, value in shipped["typed_config"].items() if key not in elsewhere}
    del wanted["grpc_service"]["envoy_grpc"]
    assert value["typed_config"] == wanted


def config(name, rendered):
    """quorate takes the config, as a pod has it."""
    text = rendered["ConfigMap", "quorate"]["data"]["quorate.toml"]
    (container,) = rendered["StatefulSet", "quorate"]["spec"]["template"]["spec"]["containers"]
    with tempfile.TemporaryDirectory() as folder:
        # What the volumes hold.
        os.mkdir(f"{folder}/secrets")
        for file, content in [("secret", "s" * 40), ("tokens", f"ada:admin:{'0' * 64}\n")]:
            with open(os.open(f"{folder}/secrets/{file}", os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
                out.write(content)
        for command in ["ca"], ["node", "--replica", "1=127.0.0.1"]:
            subprocess.run([QUORATE, "cert", *command, "--out", f"{folder}/admin"], check=True, capture_output=True)
        for ending in ["crt", "key"]:
            os.rename(f"{folder}/admin/replica-1.{ending}", f"{folder}/admin/tls.{ending}")
        text = text.replace("/run/quorate", folder)
        with open(f"{folder}/quorate.toml", "w", encoding="utf-8") as out:
            out.write(text)
        values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        values = {key: value.replace("$(POD_IP)", "10.0.0.1") for key, value in values.items()}
        values = {key: value.replace("/run/quorate", folder) for key, value in values.items()}
        # A pod's name has its number.
        named = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname quorate-0 && exec "$@"', "sh"]
        command = [*named, QUORATE, "config", "check", "--config", f"{folder}/quorate.toml"]
        told = subprocess.run(command, env={**os.environ, **values}, capture_output=True, text=True)
    if told.returncode:
        sys.exit(f"{name}: {told.stderr}")
    print(f"{name}: quorate takes the config")


def promises(rendered):
    """What the guide says of pods."""
    pod = rendered["StatefulSet", "quorate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain_s = 5 + 30 + 10
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert rendered["Service", "quorate-peers"]["spec"]["publishNotReadyAddresses"]
    print("pods: no root, no capabilities, read-only, time to drain")


def extended():
    """What the chart's optional values say is in the pods, beside what is always there."""
    rendered, plain = objects("extended.helm"), objects("base.helm")
    valid("extended", rendered)
    with open(f"{HERE}/helm/quorate/ci/extended-values.yaml", encoding="utf-8") as file:
        values = yaml.safe_load(file)
    template = rendered["StatefulSet", "quorate"]["spec"]["template"]
    pod, metadata = template["spec"], template["metadata"]
    before = plain["StatefulSet", "quorate"]["spec"]["template"]["spec"]
    (container,), (container_before,) = pod["containers"], before["containers"]
    selector = rendered["StatefulSet", "quorate"]["spec"]["selector"]["matchLabels"]
    assert metadata["labels"] == {**selector, **values["podLabels"]}
    assert metadata["annotations"] == values["podAnnotations"]
    assert pod["volumes"] == before["volumes"] + values["extraVolumes"]
    assert container["volumeMounts"] == container_before["volumeMounts"] + values["extraVolumeMounts"]
    assert pod["initContainers"] == values["initContainers"]
    assert container["envFrom"] == values["envFrom"]
    assert pod["priorityClassName"] == values["priorityClassName"]
    (constraint,) = values["topologySpreadConstraints"]
    assert pod["topologySpreadConstraints"] == [{**constraint, "labelSelector": {"matchLabels": selector}}]
    account = values["serviceAccount"]["name"]
    assert pod["serviceAccountName"] == account
    monitoring = {("ServiceMonitor", "quorate"), ("PrometheusRule", "quorate")}
    assert rendered.keys() == plain.keys() - {("ServiceAccount", "quorate")} | monitoring
    (scraped,) = rendered["ServiceMonitor", "quorate"]["spec"]["endpoints"]
    ports = {one["name"]: one["port"] for one in rendered["Service", "quorate-peers"]["spec"]["ports"]}
    assert scraped["port"] == "metrics" and ports["metrics"] == values["listen"]["metrics"]
    served = {port["name"]: port["port"] for port in rendered["Service", "quorate"]["spec"]["ports"]}
    assert served["scaler"] == ports["scaler"] == values["listen"]["scaler"]
    assert {"name": "QUORATE_LISTEN__METRICS", "value": "0.0.0.0:9090"} in container["env"]
    (subject,) = rendered["RoleBinding", "quorate"]["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
    print("extended: the chart's optional values are in the pods")


def metrics():
    """Alerts ask for metrics that there are."""
    with open(f"{HERE}/helm/quorate/files/alerts.yaml", encoding="utf-8") as file:
        asked = set(re.findall(r"quorate_[a-z_]+", file.read()))
    with open(f"{HERE}/../../docs/reference/metrics.md", encoding="utf-8") as file:
        known = set(re.findall(r"^\| `([a-z_]+)`", file.read(), re.M))
    assert asked <= known, asked - known
    print(f"alerts: {len(asked)} metrics, all in docs/reference/metrics.md")


for case in ["base", "gateway", "production"]:
    same = alike(case)
    valid(case, same)
    config(case, same)
    promises(same)
    if case == "gateway":
        picks(same)
        for gateway in GATEWAYS:
            for_one(gateway, same)
extended()
metrics()
