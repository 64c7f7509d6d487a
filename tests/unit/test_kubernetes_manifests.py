"""Kubernetes manifests against schemas of KubeRay and Kubernetes; and what they say of each other."""

import copy
import importlib.util
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))

_spec = importlib.util.spec_from_file_location("kubernetes_schemas", Path(__file__).with_name("kubernetes_schemas.py"))
schemas = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(schemas)


def documents(file):
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def problems(document):
    validator = jsonschema.Draft202012Validator(schemas.manifest_schema(document))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_manifest_has_only_known_fields_of_the_right_type(file):
    for document in documents(file):
        assert problems(document) == []


def job():
    (document,) = documents(ROOT / "deploy" / "kubernetes" / "rayjob.yaml")
    return document


HEAD = ("spec", "rayClusterSpec", "headGroupSpec")
POD = (*HEAD, "template", "spec")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "backofLimit"), 0),
        (("spec", "entrypoint"), ["laminar"]),
        ((*HEAD, "rayStartParams", "num-cpus"), 8),
        ((*POD, "containers", 0, "resources", "limits", "memory"), "8 GB"),
        ((*POD, "volumes", 0, "emptyDir", "medium"), "memory"),
        ((*POD, "containers", 0, "ports", 0, "containerPort"), "6379"),
    ],
)  # fmt: skip
def test_a_misspelt_field_and_a_value_of_the_wrong_type_are_found(path, value):
    broken = copy.deepcopy(job())
    place = broken
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert len(problems(broken)) == 1


def pods():
    (cluster,) = documents(ROOT / "deploy" / "kubernetes" / "raycluster.yaml")
    for name, spec in (("rayjob", job()["spec"]["rayClusterSpec"]), ("raycluster", cluster["spec"])):
        for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])):
            yield name, group


def test_every_pod_has_memory_for_weights_of_its_own_and_shares_runs_and_models():
    for name, group in pods():
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory", name
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "laminar-runs"}
        mounts = {mount["mountPath"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/runs", "/models"} <= mounts
        assert spec["terminationGracePeriodSeconds"] >= 60


def test_claims_that_pods_name_are_described():
    described = {d["metadata"]["name"]: d for file in FILES for d in documents(file) if d["kind"] == "PersistentVolumeClaim"}
    assert set(described) == {"laminar-runs", "laminar-models"}
    assert described["laminar-runs"]["spec"]["accessModes"] == ["ReadWriteMany"]  # all machines write into the run folder


def test_a_run_on_several_machines_is_told_of_a_data_module_that_they_all_reach():
    (service,) = (d for file in FILES for d in documents(file) if d["kind"] == "Service")
    entry = job()["spec"]["entrypoint"]
    assert f"experience.redis_url=redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/0" in entry
