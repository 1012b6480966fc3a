"""The deployment's files, checked without an engine: schema, lint, and that what they name exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from ruamel.yaml import YAML

from recovery.inspect.displays import PrometheusListener
from recovery.supervise.metrics import ProgressCollector
from recovery.supervise.supervisor import Progress

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SCRIPTS = Path(sysconfig.get_path("scripts"))


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=60)


def compose_check(path: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def load(name: str) -> dict:
    return YAML(typ="safe").load((DOCKER / name).read_text())


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.py")), ids=lambda path: path.name)
def test_scripts_import_what_is_there(path):
    done = run(sys.executable, "-c", f"import runpy; runpy.run_path({str(path)!r}, run_name='not main')")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compose_follows_the_schema_and_a_wrong_one_does_not(tmp_path):
    done = compose_check(DOCKER / "compose.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("depends_on:", "depend_on:", 1))
    assert compose_check(wrong).returncode != 0


def test_the_dockerfile_is_clean_and_a_wrong_one_is_not(tmp_path):
    done = run(SCRIPTS / "hadolint", DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python\nRUN cd /tmp && apt-get install curl\n")
    assert run(SCRIPTS / "hadolint", wrong).returncode != 0


def test_the_dockerfile_copies_what_is_there_and_not_ignored():
    allowed = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [
        word
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    ]
    assert len(copied) >= 6
    readme = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]["readme"]
    for name in copied:
        assert name in allowed, name
        assert name == readme or (DOCKER.parent / name).exists(), name


def test_services_name_each_other_and_files_that_exist():
    compose = load("compose.yaml")
    services = compose["services"]
    assert {"kafka", "spark-master", "spark-worker-1", "spark-worker-2", "job", "prometheus", "grafana"} <= set(
        services
    )
    for name, service in services.items():
        assert set(service.get("depends_on", [])) <= set(services), name
        assert ":latest" not in service["image"]
        assert ":" in service["image"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith("./") else source in compose["volumes"], volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port
        for word in service.get("command", []):
            for host in re.findall(r"(?:spark://)?([a-z0-9-]+):\d+", str(word)):
                assert host in services, word
            if str(word).startswith("/opt/rewind/"):
                assert (DOCKER / Path(word).name).exists(), word
    for scrape in load("prometheus.yml")["scrape_configs"]:
        for target in scrape["static_configs"][0]["targets"]:
            assert target.split(":")[0] in services
    assert "job:9108" in (DOCKER / "prometheus.yml").read_text()
    command = services["job"]["command"]
    assert command[command.index("--metrics-port") + 1] == "9108"


@pytest.mark.parametrize("script", ["job.py", "produce.py"])
def test_the_options_that_compose_gives_are_known(script):
    given = {
        word
        for service in load("compose.yaml")["services"].values()
        for at, word in enumerate(service.get("command", []))
        if str(word).startswith("--") and f"/opt/rewind/{script}" in service["command"][:at]
    }
    assert given
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', (DOCKER / script).read_text()))
    assert given <= known


def test_the_dashboard_asks_for_metrics_that_are_served():
    registry = CollectorRegistry()
    PrometheusListener(registry)
    steps = ("open_ms", "operate_ms", "stage_ms", "changelog_ms", "messages_stored", "windows_open", "staged_bytes")
    progress = Progress(last=[{"shard": 0, "metrics": dict.fromkeys(steps, 1)}])
    registry.register(ProgressCollector(lambda: progress))
    served = set()
    for family in registry.collect():
        served |= {family.name, family.name + "_total"} if family.type == "counter" else {family.name}
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "rewind.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"rewind_[a-z_]+", target["expr"])
    }
    assert len(asked) >= 12
    assert asked <= served
    sources = ("recovery/operate.py", "backend/windows/operator.py")
    source = "".join((DOCKER.parent / path).read_text() for path in sources)
    assert [step for step in steps if f'"{step}"' not in source and f'step("{step[:-3]}")' not in source] == []
    data = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {data["uid"]}
    assert data["url"] == "http://prometheus:9090"


def test_the_readme_names_services_that_exist():
    commands = re.findall(
        r"^docker compose -f docker/compose\.yaml (.*?)\s*(?:#.*)?$", (DOCKER / "README.md").read_text(), re.M
    )
    assert len(commands) >= 5
    services = set(load("compose.yaml")["services"])
    for command in commands:
        words = [word for word in command.split()[1:] if not word.startswith("--")]
        assert set(words) <= services, command
