"""The manifests in packaging/kubernetes fit the schemas of Kubernetes and of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support import kustomization
from test_kubernetes_manifests import FOLDER, KINDS, kustomized, patched, scaled

pytestmark = pytest.mark.slow

CRDS = Path(__file__).with_name("crds")
VERSION = kubernetes_validate.latest_version()
OF_KUBERNETES = {
    "PodTemplate": lambda part: {"apiVersion": "v1", "kind": "PodTemplate", "template": part},
    "Job": lambda part: {"apiVersion": "batch/v1", "kind": "Job", **part},
    "env": lambda part: _with_container(env=part),
    "resources": lambda part: _with_container(resources=part),
}


def _with_container(**fields: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "node", **fields}]}}
    return {"apiVersion": "v1", "kind": "PodTemplate", "template": template}


def _strict(schema: Any) -> Any:
    """Let an object have the fields only that its schema lists: the API server drops others, with a warning."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(each) for name, each in schema.items()}
    if "properties" in found and "type" in found:
        found.setdefault("additionalProperties", False)
    return found


def _schema(kind: str) -> dict[str, Any]:
    return _strict(yaml.safe_load((CRDS / f"{kind.lower()}.yaml").read_text()))


def _check_object(_: Any, kind: str, part: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    try:
        kubernetes_validate.validate(OF_KUBERNETES[kind](part), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield jsonschema.ValidationError(f"{kind}: {error}")


def _check_schema(validator: Any, kind: str, part: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
    yield from validator.descend(part, _schema(kind)["properties"]["spec"])


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"x-kubernetes-object": _check_object, "x-schema": _check_schema}
)


def check(found: dict[str, Any]) -> None:
    """Check an object against the schema of its kind."""
    if (CRDS / f"{found['kind'].lower()}.yaml").exists():
        Validator(_schema(found["kind"])).validate(found)
    else:
        kubernetes_validate.validate(found, VERSION, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_fits_its_schema(kind: str) -> None:
    for each in kustomization.render(FOLDER / kind):
        check(each)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Job", "spec.completion", 2),
        ("Job", "spec.podFailurePolicy.rules.1.onExitCodes.values", ["143"]),
        ("JobSet", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.comand", []),
        ("JobSet", "spec.network.subDomain", "train"),
        ("MPIJob", "spec.mpiReplicaSpecs.Worker.template.spec.restartPolicy", 1),
        ("MPIJob", "spec.launcherCreationPolicy", "Later"),
        ("ClusterTrainingRuntime", "spec.template.spec.failurePolicy.maxRestarts", "3"),
        ("TrainJob", "spec.trainer.env", [{"value": "1"}]),
        ("TrainJob", "spec.trainer.nodes", 2),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: str, value: object) -> None:
    [found] = [each for name in KINDS for each in kustomization.render(FOLDER / name) if each["kind"] == kind][:1]
    check(found)
    *parts, last = path.split(".")
    part: Any = found
    for each in parts:
        part = part[int(each) if isinstance(part, list) else each]
    part[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(found)


def test_what_the_page_makes_of_them_fits(tmp_path: Path) -> None:
    names = ("state", "shm")
    folders = [tmp_path / name for name in ("page", *names)]
    for folder in folders:
        folder.mkdir()
    made = [patched(folder, name) for folder, name in zip(folders[1:], names, strict=True)]
    for each in (*kustomized(folders[0]), *made, *scaled()):
        check(each)
