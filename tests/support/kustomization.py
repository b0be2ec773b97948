"""The objects that `kubectl kustomize` prints, for the part of kustomize that packaging/kubernetes uses."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

LOCAL = "config.kubernetes.io/local-config"
KEYS = {"apiVersion", "kind", "resources", "components", "patches", "replacements", "images"}


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    return [each for each in _accumulate(folder, []) if LOCAL not in each["metadata"].get("annotations", {})]


def references(folder: Path) -> list[Path]:
    """The files and folders that a kustomization names."""
    found = _load(folder)
    return [folder / name for name in [*found.get("resources", []), *found.get("components", [])]]


def _load(folder: Path) -> dict[str, Any]:
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert found.keys() <= KEYS, f"{folder}: {found.keys() - KEYS}"
    return found


def _accumulate(folder: Path, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the objects of a folder to those that there are, and change all of them as it says."""
    found = _load(folder)
    for name in found.get("resources", []):
        path = folder / name
        objects = [*objects, *(_accumulate(path, []) if path.is_dir() else yaml.safe_load_all(path.read_text()))]
    for name in found.get("components", []):
        objects = _accumulate(folder / name, objects)
    for patch in found.get("patches", []):
        for each in _select(objects, patch["target"]):
            for operation in yaml.safe_load(patch["patch"]):
                _patch(each, operation)
    for replacement in found.get("replacements", []):
        source = replacement["source"]
        [origin] = _select(objects, {"kind": source["kind"]})
        value = origin[source["fieldPath"]]
        for target in replacement["targets"]:
            for each in _select(objects, target["select"]):
                for path in target["fieldPaths"]:
                    _replace(each, path, value)
    for image in found.get("images", []):
        for each in objects:
            _rename(each, image)
    return objects


def _select(objects: list[dict[str, Any]], target: dict[str, str]) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == target["kind"]]


def _patch(found: Any, operation: dict[str, Any]) -> None:
    *parts, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
    for part in parts:
        found = found[int(part) if isinstance(found, list) else part]
    key = int(last) if isinstance(found, list) else last
    if operation["op"] != "add":
        found[key]  # it must exist
    if operation["op"] == "remove":
        del found[key]
    elif isinstance(found, list) and operation["op"] == "add":
        found.insert(key, operation["value"])
    else:
        found[key] = operation["value"]


def _replace(found: Any, path: str, value: Any) -> None:
    *parts, last = re.findall(r"\[[^\]]*\]|[^.]+", path)
    for part in parts:
        if part.startswith("["):
            name, _, wanted = part.strip("[]").partition("=")
            [found] = [each for each in found if each[name] == wanted]
        else:
            found = found[part]
    found[last] = deepcopy(value)


def _rename(found: Any, image: dict[str, str]) -> None:
    if isinstance(found, list):
        for each in found:
            _rename(each, image)
    elif isinstance(found, dict):
        for container in found.get("containers", []):
            if container.get("image") == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
        for each in found.values():
            _rename(each, image)
