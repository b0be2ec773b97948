"""The manifests in packaging/kubernetes fit each other, what jobs need, and the page about them."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import kustomization

from horovodlike import config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "kubernetes"
PAGE = ROOT / "docs" / "users" / "kubernetes.md"
JOBS = ["indexed-job", "jobset", "mpijob", "trainjob", "elastic"]
KINDS = ["trainer", *JOBS]


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """All pod specs within an object."""
    for each in found if isinstance(found, list) else found.values() if isinstance(found, dict) else ():
        yield from pods(each)
    if isinstance(found, dict) and "containers" in found:
        yield found


def objects(kind: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in kustomization.render(FOLDER / kind)}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_a_kustomization_lists_what_there_is(path: Path) -> None:
    named = kustomization.references(path.parent)
    assert all(each.exists() for each in named)
    beside = {each for each in path.parent.iterdir() if each.suffix == ".yaml"} - {path}
    assert {each for each in named if each.suffix} == beside


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_makes_the_same(kind: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", FOLDER / kind], capture_output=True, text=True, check=True, timeout=60)
    expected = sorted(yaml.safe_load_all(done.stdout), key=json.dumps)
    order = {"sort_keys": True}
    found = kustomization.render(FOLDER / kind)
    assert sorted(json.dumps(each, **order) for each in found) == sorted(json.dumps(each, **order) for each in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_rights(kind: str) -> None:
    found = list(pods([{name: each for name, each in objects(kind).items() if name != "TrainJob"}]))
    assert found or kind == "trainjob"
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (kind == "elastic")
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container["resources"].keys()


def test_workers_have_time_to_leave() -> None:
    for kind in KINDS:
        for pod in pods(kustomization.render(FOLDER / kind)):
            variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
            assert config.SETTINGS["grace_period"].variable == "HOROVODLIKE_GRACE_PERIOD"
            assert float(variables["HOROVODLIKE_GRACE_PERIOD"]) + 5 <= pod["terminationGracePeriodSeconds"]


def test_no_file_has_a_key() -> None:
    assert not [
        path
        for path in FOLDER.rglob("*")
        if path.is_file() and re.search("kind: Secret|[0-9a-f]{32}", path.read_text())
    ]


@pytest.mark.parametrize("kind", JOBS)
def test_objects_around_a_job_are_for_its_pods(kind: str) -> None:
    found = objects(kind)
    chosen = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    [rule] = found["NetworkPolicy"]["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == chosen
    if kind == "trainjob":
        assert chosen == {"jobset.sigs.k8s.io/jobset-name": found["TrainJob"]["metadata"]["name"]}
        return
    text = json.dumps(found)
    for labels in re.findall(r'"labels": (\{.*?\})', text):
        assert chosen.items() <= json.loads(labels).items()
    for pod in pods(found):
        assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    if "Service" in found:
        assert found["Service"]["spec"]["selector"] == chosen
        assert found["Service"]["metadata"]["name"] == found["Job"]["spec"]["template"]["spec"]["subdomain"]


def test_numbers_of_nodes_agree() -> None:
    job = objects("indexed-job")["Job"]["spec"]
    jobset = objects("jobset")["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    for spec in (job, jobset):
        words = spec["template"]["spec"]["containers"][0]["command"]
        assert words[words.index("--nnodes") + 1] == str(spec["completions"]) == str(spec["parallelism"])
    spec = objects("elastic")["Job"]["spec"]
    words = spec["template"]["spec"]["containers"][0]["command"]
    least, most = map(int, words[words.index("--nnodes") + 1].split(":"))
    assert least <= spec["completions"] == spec["parallelism"] <= most


def actions(spec: dict[str, Any]) -> dict[int | str, str]:
    """Actions of a Job when a pod fails, by exit code or condition."""
    found: dict[int | str, str] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {"values": []})["values"]:
            found[code] = rule["action"]
        for condition in rule.get("onPodConditions", []):
            found[condition["type"]] = rule["action"]
    return found


def test_a_failure_restarts_what_it_should() -> None:
    """75 and 143 are ends after SIGTERM to any pod; 2 is a usage error, which a surplus elastic pod has too."""
    job = objects("indexed-job")["Job"]["spec"]
    assert actions(job) == {"DisruptionTarget": "Ignore", 75: "Ignore", 143: "Ignore", 2: "FailJob"}
    assert job["backoffLimit"] == 3 * job["completions"]  # each time all may fail
    elastic = objects("elastic")["Job"]["spec"]
    assert actions(elastic) == {"DisruptionTarget": "Ignore", 75: "Ignore", 143: "Ignore", 2: "FailIndex"}
    assert elastic["backoffLimitPerIndex"] > 0  # FailIndex needs it
    jobset = objects("jobset")["JobSet"]["spec"]
    expected = dict.fromkeys(["DisruptionTarget", 75, 143], "FailJob")
    assert actions(jobset["replicatedJobs"][0]["template"]["spec"]) == expected
    [rule] = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_an_elastic_job_ends_with_its_leader() -> None:
    assert objects("elastic")["Job"]["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_one_elastic_pod_at_a_time_is_evicted() -> None:
    found = objects("elastic")
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] == found["Job"]["spec"]["completions"] - 1


def test_the_role_has_the_least_rights() -> None:
    found = objects("elastic")
    assert found["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    [subject] = found["RoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": found["ServiceAccount"]["metadata"]["name"]}
    assert not any({"Role", "ClusterRole"} & objects(kind).keys() for kind in KINDS if kind != "elastic")


def blocks_of_the_page(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The objects of the page's kustomization, which stands beside a checkout of this project."""
    [overlay] = [block for block in blocks_of_the_page("yaml") if "images:" in block]
    assert "horovodlike/packaging/kubernetes/indexed-job" in overlay
    (folder / "kustomization.yaml").write_text(overlay)
    (folder / "horovodlike").symlink_to(ROOT)
    return kustomization.render(folder)


def patched(folder: Path, name: str) -> dict[str, Any]:
    """The elastic job with the page's patch for a volume."""
    [patch] = [block for block in blocks_of_the_page("yaml") if f"name: {name}," in block and "images:" not in block]
    patches = [{"target": {"kind": "Job"}, "patch": patch}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["elastic"], "patches": patches}))
    (folder / "elastic").symlink_to(FOLDER / "elastic")
    [job] = [each for each in kustomization.render(folder) if each["kind"] == "Job"]
    return job


def lines_of_the_page() -> list[str]:
    return [line for block in blocks_of_the_page("sh") for line in block.splitlines()]


def scaled() -> tuple[dict[str, Any], dict[str, Any]]:
    """The elastic job and its PodDisruptionBudget after the page's commands that scale it."""
    found = objects("elastic")
    job, budget = found["Job"], found["PodDisruptionBudget"]
    scaling = [shlex.split(line) for line in lines_of_the_page() if "kubectl patch" in line]
    assert [words[2] for words in scaling] == ["job", "pdb"]
    for words, each in zip(scaling, (job, budget), strict=True):
        each["spec"] |= json.loads(words[-1])["spec"]
        assert words[3] == each["metadata"]["name"]
    return job, budget


def test_the_kustomization_of_the_page_works(tmp_path: Path) -> None:
    found = kustomized(tmp_path)
    [pod] = pods(found)
    [container] = pod["containers"]
    assert container["image"] == "registry.example/train:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    [job] = [each["spec"] for each in found if each["kind"] == "Job"]
    assert container["command"][:3] == ["hvdrun", "--nnodes", str(job["completions"])]
    assert job["backoffLimit"] == 3 * job["completions"]


@pytest.mark.parametrize("name", ["state", "shm"])
def test_the_patches_of_the_page_fit(tmp_path: Path, name: str) -> None:
    job = patched(tmp_path, name)
    [pod] = pods(job)
    assert pod["volumes"][1]["name"] == pod["containers"][0]["volumeMounts"][1]["name"] == name


def test_the_commands_of_the_page_work() -> None:
    lines = lines_of_the_page()
    job, budget = scaled()
    assert budget["spec"]["minAvailable"] == job["spec"]["completions"] - 1
    targets = {"cpu": "cpu", "cuda": "cuda", "ssh": None}
    for line in lines:
        if line.startswith("docker"):
            words = shlex.split(line)
            file, tag = words[words.index("-f") + 1], words[words.index("-t") + 1]
            assert (ROOT / file).exists()
            target = targets[tag.removeprefix("horovodlike:")]
            assert target is None or f"AS {target}\n" in (ROOT / file).read_text()
        for folder in re.findall(r"apply -k (packaging\S+)", line):
            assert (ROOT / folder / "kustomization.yaml").exists()
    [keys] = [line for line in lines if "create secret" in line]
    if shutil.which("kubectl") and shutil.which("openssl"):
        done = subprocess.run(
            ["sh", "-c", f"{keys} --dry-run=client -o yaml"], capture_output=True, text=True, check=True, timeout=60
        )
        secret = yaml.safe_load(done.stdout)
        [variable] = [each for pod in pods(job) for each in pod["containers"][0]["env"] if "valueFrom" in each]
        wanted = variable["valueFrom"]["secretKeyRef"]
        assert secret["metadata"]["name"] == wanted["name"]
        assert re.fullmatch(r"[0-9a-f]{64}", base64.b64decode(secret["data"][wanted["key"]]).decode())
