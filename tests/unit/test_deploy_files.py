"""Deployment files: they parse, name settings and metrics that exist, and agree with each other."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import psutil
import pytest
import yaml

from laminar.config.overrides import apply_override
from laminar.config.schema import place_at
from laminar.dashboard.prometheus import exported_name
from laminar.telemetry.registry import METRICS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
EXPORTER_ONLY = {
    "laminar_up", "laminar_role_silent_seconds", "laminar_staleness_bound", "laminar_outstanding_groups", "laminar_alerts",
    "laminar_free_disk_ratio", "laminar_mismatch_alarm",
}  # fmt: skip


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pod_templates():
    (job,), (cluster,) = documents("kubernetes/rayjob.yaml"), documents("kubernetes/raycluster.yaml")
    clusters = {"rayjob": job["spec"]["rayClusterSpec"], "raycluster": cluster["spec"]}
    return {name: spec["headGroupSpec"]["template"] for name, spec in clusters.items()}


@pytest.mark.parametrize("file", ["grafana/laminar.json", "prometheus/alerts.yml"])
def test_every_metric_that_is_named_is_one_we_export(file):
    names = set(re.findall(r"\blaminar_[a-z0-9_]+", re.sub(r"uid.*", "", (DEPLOY / file).read_text())))
    exported = {exported_name(metric, metric.name.replace("*", "x"))[0] for metric in METRICS if "*" not in metric.name}
    families = [exported_name(metric, metric.name)[0].rstrip("_") for metric in METRICS if "*" in metric.name]
    unknown = {
        n for n in names - exported - EXPORTER_ONLY if not any(n.startswith(family.rstrip("_*")) for family in families)
    }
    assert unknown == set()
    assert len(names) > 5


@pytest.mark.parametrize("file", ["prometheus.yml", "compose.yml"])
def test_a_run_that_is_down_raises_its_alert_also_where_its_dashboard_ended_with_it(file):
    (scraped,) = documents(f"prometheus/{file}")[0]["scrape_configs"]
    (down,) = (
        rule["expr"]
        for group in documents("prometheus/alerts.yml")[0]["groups"]
        for rule in group["rules"]
        if rule["alert"] == "LaminarRunDown"
    )
    assert down == f'laminar_up < 1 or up{{job="{scraped["job_name"]}"}} < 1'


def test_what_prometheus_alarms_of_is_judged_by_the_runs_own_limits():
    """A group keeps a bound that was lowered since; stale tokens have a large KL without any fault."""
    groups = documents("prometheus/alerts.yml")[0]["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    assert rules["LaminarMismatch"] == (
        "avg_over_time(laminar_mismatch_kl_staleness_0[10m]) / on (run) laminar_mismatch_alarm > 1"
    )
    assert rules["LaminarStalenessAboveBound"] == (
        "laminar_staleness_versions_max - on (run) "
        "(max_over_time(laminar_staleness_bound[6h]) and laminar_staleness_bound) > 0"
    )


def test_panels_have_titles_expressions_and_a_variable_for_the_run():
    dashboard = json.loads((DEPLOY / "grafana" / "laminar.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 15
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"])
    for upper, panel in enumerate(dashboard["panels"]):
        for other in dashboard["panels"][:upper]:
            a, b = panel["gridPos"], other["gridPos"]
            apart = (
                a["x"] + a["w"] <= b["x"]
                or b["x"] + b["w"] <= a["x"]
                or a["y"] + a["h"] <= b["y"]
                or b["y"] + b["h"] <= a["y"]
            )
            assert apart, (panel["title"], other["title"])


def settings_in(text):
    return re.findall(r"(?<![\w.])((?:run|model|data|experience|dashboard|cluster|eval|relay|rollout)\.[a-z_.]+)=", text)


@pytest.mark.parametrize(
    "file",
    ["docker/compose.yaml", "kubernetes/rayjob.yaml", "kubernetes/raycluster.yaml", "slurm/laminar.sbatch", "README.md"],
)
def test_every_setting_that_is_named_exists(file):
    for name in settings_in((DEPLOY / file).read_text()):
        assert place_at(tuple(name.split("."))) is not None, name
        assert apply_override({}, f"{name}=1")[1] is None


def test_pods_mount_memory_for_weights_and_every_mount_has_its_volume():
    for name, template in pod_templates().items():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) == set(volumes), name
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests["nvidia.com/gpu"] == limits["nvidia.com/gpu"]
        assert spec["terminationGracePeriodSeconds"] >= 60


COMPOSE_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string"},
        "build": {"type": "object", "required": ["context"], "propertyNames": {"enum": ["context", "dockerfile", "args"]}},
        "hostname": {"type": "string"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "properties": {
                    "condition": {"enum": ["service_started", "service_healthy", "service_completed_successfully"]}
                },
                "required": ["condition"],
            },
        },
        "command": {"type": "array", "items": {"type": "string"}},
        "environment": {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
        "healthcheck": {
            "type": "object",
            "required": ["test"],
            "propertyNames": {"pattern": "^(test|interval|timeout|retries|start_period)$"},
        },
        "shm_size": {"type": "string", "pattern": r"^\d+(b|kb|mb|gb)$"},
        "init": {"type": "boolean"},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+(s|m)$"},
        "ulimits": {"type": "object", "additionalProperties": {"type": "integer"}},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^[\d.]+:\d+:\d+$"}},
        "volumes": {"type": "array", "items": {"type": "string", "pattern": r"^[^:]+(:-[^:]+)?:[^:]+(:ro)?$"}},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
    },
    "oneOf": [{"required": ["image"]}, {"required": ["build"]}],
}
"""What our services may say: names and types as the Compose specification has them; a misspelt one is found."""


def test_the_compose_file_has_only_known_keys_of_the_right_type():
    (compose,) = documents("docker/compose.yaml")
    assert set(compose) == {"name", "services", "volumes"}
    for name, service in compose["services"].items():
        problems = [error.message for error in jsonschema.Draft202012Validator(COMPOSE_SERVICE).iter_errors(service)]
        assert problems == [], name
        assert set(service.get("depends_on", {})) <= set(compose["services"])
    named = {v.partition(":")[0] for s in compose["services"].values() for v in s.get("volumes", []) if v[0] not in "./$"}
    assert named == set(compose["volumes"])
    assert list(jsonschema.Draft202012Validator(COMPOSE_SERVICE).iter_errors({"image": "a", "shm-size": "4gb"}))


def test_compose_mounts_files_that_are_there():
    (compose,) = documents("docker/compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "docker" / source).exists(), source
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    assert (DEPLOY.parent / compose["services"]["run"]["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("file", ["docker/Dockerfile.cpu", "docker/Dockerfile.gpu"])
def test_dockerfiles_copy_what_is_there(file):
    text = (DEPLOY / file).read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source


SRUN = """#!/bin/sh
case "$*" in *hostname*) echo 127.0.0.1; exit;; esac
echo $$ >> "$PIDS"; exec /bin/sleep 60
"""


def test_the_slurm_script_ends_ray_on_every_node_and_with_the_runs_status(tmp_path):
    programs = {"scontrol": "printf 'a\\nb\\nc\\n'", "sleep": "exec /bin/sleep 0.2", "laminar": "exit 4", "srun": SRUN}
    for name, text in programs.items():
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    pids = tmp_path / "pids"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b,c", "PIDS": str(pids)}
    ended = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "laminar.sbatch"), "x.toml"], env=environment, cwd=tmp_path, timeout=30
    )
    started = [int(pid) for pid in pids.read_text().split()]
    assert (ended.returncode, len(started)) == (4, 3)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=10)
    assert alive == []


def test_kuberay_reaches_the_heads_port_for_jobs():
    (job,), (cluster,) = documents("kubernetes/rayjob.yaml"), documents("kubernetes/raycluster.yaml")
    for spec in (job["spec"]["rayClusterSpec"]["headGroupSpec"], cluster["spec"]["headGroupSpec"]):
        assert spec["rayStartParams"]["dashboard-host"] == "0.0.0.0"
        (head,) = spec["template"]["spec"]["containers"]
        assert {"name": "dashboard", "containerPort": 8265} in head["ports"]


def test_the_slurm_script_is_well_formed():
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm" / "laminar.sbatch")], check=True)
