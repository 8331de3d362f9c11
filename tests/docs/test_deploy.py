"""The files in `deploy/` agree with the program: its flags, settings, routes and series."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from forebay.cli.arguments import Parser
from forebay.cluster.local import SETTINGS as RAY_SETTINGS
from forebay.config.server_args import BY_NAME
from forebay.config.sources import from_file
from forebay.server.app import ROUTES
from scripts.bootstrap import TORCH
from scripts.site import metrics
from scripts.site.pages import ROOT
from tests.together import together

DEPLOY = ROOT / "deploy"
PATHS = {route.path for route in ROUTES}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def served(words: list[str]) -> dict[str, object]:
    """What `forebay serve` reads of its words."""
    assert words[0] == "serve"
    parser = Parser("serve", "", "")
    parser.engine_flags(server=True, model_is_positional=True)
    return parser.parse(words[1:]).flags


def kind(name: str) -> dict[str, Any]:
    return next(found for found in documents("kubernetes.yaml") if found["kind"] == name)


def test_the_settings_are_settings(tmp_path: Path) -> None:
    inside = tmp_path / "inside.toml"
    inside.write_text(kind("ConfigMap")["data"]["forebay.toml"])
    for path in (DEPLOY / "forebay.toml", inside):
        assert from_file(path).keys() == tomllib.loads(path.read_text()).keys()


def test_the_commands_are_commands() -> None:
    unit = re.search(r"^ExecStart=\S+/forebay (.*)$", (DEPLOY / "forebay.service").read_text(), re.MULTILINE)
    assert unit is not None
    docker = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(docker[0]) == ["forebay"]
    compose = documents("compose.yaml")[0]["services"]["forebay"]["command"]
    container = kind("Deployment")["spec"]["template"]["spec"]["containers"][0]
    for words in (unit[1].split(), json.loads(docker[1]), compose, container["args"]):
        served(words)


def test_recommended_torch_satisfies_the_bounds_of_the_wheel() -> None:
    """Of another pip would replace the CPU build by that for CUDA."""
    wanted = next(text for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
                  if text.startswith("torch"))  # fmt: skip
    pages = [ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md")]
    told = [found for page in pages for found in re.findall(r"pip install '?(torch[^' ]*)", page.read_text())]
    assert len(told) == 3
    assert {text.removeprefix("torch") for text in told} == {wanted.rpartition(",")[2]}
    pinned = re.findall(r"^ARG TORCH=(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert pinned == [TORCH.removeprefix("torch==")]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")


def test_clone_and_wheel_install_what_decodes_images() -> None:
    """Without Pillow a model with images starts and refuses each image."""
    wanted = {name_of(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith(("#", "-"))}
    assert "pillow" in wanted
    assert wanted - pinned == {"torch", "pip"}  # scripts/bootstrap.py installs the one, an environment brings the other


def test_probes_and_ports_are_those_of_the_server() -> None:
    pod = kind("Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    port = tomllib.loads((DEPLOY / "forebay.toml").read_text())["port"]
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    assert kind("Service")["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    for text in (json.dumps(container["readinessProbe"]), (DEPLOY / "Dockerfile").read_text()):
        asked = re.search(rf"http://127\.0\.0\.1:{port}(/\w+)", text)
        assert asked is not None
        assert asked[1] in PATHS
    assert kind("Deployment")["spec"]["selector"]["matchLabels"] == kind("Service")["spec"]["selector"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_what_is_stopped_has_time_to_drain() -> None:
    drain = BY_NAME["drain_timeout"].default
    assert isinstance(drain, float)
    unit = (DEPLOY / "forebay.service").read_text()
    grace = documents("compose.yaml")[0]["services"]["forebay"]["stop_grace_period"]
    pod = kind("Deployment")["spec"]["template"]["spec"]
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > drain
    assert int(grace.removesuffix("s")) > drain
    assert pod["terminationGracePeriodSeconds"] > drain


def test_prometheus_asks_with_a_key_where_the_server_listens() -> None:
    job = documents("prometheus.yml")[0]["scrape_configs"][0]
    assert job["authorization"]["type"] == "Bearer"
    services = documents("compose.yaml")[0]["services"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    settings = tomllib.loads((DEPLOY / "forebay.toml").read_text())
    assert host in services
    assert host in settings["allowed_hosts"]
    assert int(port) == settings["port"]


def alerts() -> list[dict[str, Any]]:
    (group,) = documents("alerts.yaml")[0]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return found


def queries() -> list[str]:
    asked = [target["expr"] for panel in panels() if panel["type"] != "row" for target in panel["targets"]]
    page = (ROOT / "docs/guide/deploying.md").read_text()
    alarms = re.findall(r"^\| `(.*forebay.*)` \|", page, re.MULTILINE)
    assert len(alarms) == 4
    return asked + alarms + [alert["expr"] for alert in alerts()]


@together("query", queries())
def test_every_query_is_one_and_asks_for_series_that_there_are(query: str) -> None:
    """PromQL, with the durations that Grafana puts in."""
    promql_parser.parse(query.replace("$__rate_interval", "1m"))
    asked = set(re.findall(r"forebay:\w+", query))
    page = metrics.page()
    assert {name for name in asked if f"`{re.sub('_(bucket|sum|count)$', '', name)}`" not in page} == set()


def test_alarms_have_names_of_their_own_and_those_of_the_guide_are_there() -> None:
    assert len({alert["alert"] for alert in alerts()}) == len(alerts()) == 7
    assert all(alert["annotations"]["summary"] for alert in alerts())
    texts = [alert["expr"] for alert in alerts()]
    page = (ROOT / "docs/guide/deploying.md").read_text()
    assert all(alarm in texts for alarm in re.findall(r"^\| `(.*forebay.*)` \|", page, re.MULTILINE))


def test_rules_of_alarms_fire_as_promtool_sees_them() -> None:
    """`tests/docs/alerts.yaml` has series and the alarms that they must cause."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("Prometheus is not installed: the queries are parsed above")
    subprocess.run([promtool, "check", "rules", DEPLOY / "alerts.yaml"], check=True)
    subprocess.run([promtool, "test", "rules", Path(__file__).parent / "alerts.yaml"], check=True)


def test_cases_of_promtool_cover_every_alarm() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
    assert cases["rule_files"] == ["../../deploy/alerts.yaml"]
    fired = {each["alertname"] for each in cases["tests"][0]["alert_rule_test"] if each["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts()}


def test_dashboard_panels_do_not_overlap_and_rows_have_their_panels() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == ["Router and roles", "Hybrids"]
    assert len({panel["id"] for panel in panels()}) == len(panels())
    latencies = [target for panel in panels()[:3] for target in panel["targets"]]
    assert all(target["exemplar"] for target in latencies)


def test_pool_of_the_gateway_in_the_guide_selects_our_pods() -> None:
    page = (ROOT / "docs" / "guide" / "observability.md").read_text()
    (pool,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "Pool" in block]
    assert pool["spec"]["selector"] == kind("Deployment")["spec"]["selector"]
    container = kind("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [container["ports"][0]["containerPort"]]


def test_kuberay_manifest_names_what_it_has_and_sets_what_the_guide_says() -> None:
    """Its structure, by the API of `ray.io/v1`: an operator of KubeRay is no part of the suite."""
    cluster, service = documents("kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert {*cluster["spec"]} == {"rayVersion", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs"}
    pinned = re.search(r"^ray==(.*)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]
    [workers] = cluster["spec"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["spec"]["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        settings = {variable["name"]: variable["value"] for variable in container["env"]}
        token = settings.pop("RAY_AUTH_TOKEN_PATH")
        assert token.startswith(tuple(mount["mountPath"] for mount in container["volumeMounts"]))
        assert settings.items() <= RAY_SETTINGS.items()
    drain = BY_NAME["drain_timeout"].default
    assert isinstance(drain, float)
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > drain
    [port] = service["spec"]["ports"]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert port["port"] in {found["containerPort"] for found in head["ports"] if found["name"] == port["targetPort"]}
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]


def test_settings_of_ray_in_the_guide_are_those_that_forebay_sets() -> None:
    page = (ROOT / "docs" / "guide" / "cluster.md").read_text()
    told = dict(re.findall(r"(RAY_(?:worker|gcs|health)\w+)=(\d+)", page))
    assert told.items() <= RAY_SETTINGS.items()
    assert len(told) == 5


def test_the_dockerfile_has_no_fault_that_hadolint_knows() -> None:
    subprocess.run([Path(sys.executable).parent / "hadolint", DEPLOY / "Dockerfile"], check=True)
