"""The image of packaging/kubernetes: what its file names exists; and it is built, on a base that debootstrap makes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import kustomization

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "kubernetes"
TEXT = (FOLDER / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)", TEXT, re.MULTILINE)
DEBIAN = "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs")
SUM = "import os, numpy, horovodlike as h; h.init(); print(os.getuid(), h.allreduce(numpy.ones(1), op=h.Sum))"
SSH = "/usr/sbin/sshd -D -e -f /etc/horovodlike/sshd_config & until ssh localhost id; do sleep 0.1; done; kill $!"


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    copied = {words.split()[0] for name, words in STEPS if name == "COPY" and not words.startswith("--from")}
    sent = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in sent if line.startswith("!")} == copied
    assert all((ROOT / each).exists() for each in copied if "*" not in each)


def test_stages_refer_to_each_other() -> None:
    stages: list[str] = []
    for name, words in STEPS:
        if name == "FROM":
            base, _, stage = words.partition(" AS ")
            assert base == "${BASE}" or base in stages
            stages.append(stage)
        for source in re.findall(r"--from=(\S+)", words):
            assert source in stages
    assert stages[-1] == "cpu"  # the one that is built if none is named
    assert "cuda" in stages


def test_the_image_asks_for_no_gpus() -> None:
    """Else a pod without nvidia.com/gpu would see all GPUs of its node where NVIDIA's runtime is the default."""
    assert "NVIDIA_VISIBLE_DEVICES" not in TEXT


@pytest.mark.parametrize("step", [words for name, words in STEPS if name == "RUN"])
def test_steps_are_programs_of_the_shell(step: str) -> None:
    subprocess.run(["sh", "-n"], input=step, text=True, check=True)


def test_the_user_is_that_of_the_pods() -> None:
    [user] = [words for name, words in STEPS if name == "USER"]
    for kind in ("indexed-job", "jobset", "mpijob", "trainer", "elastic"):
        text = str(kustomization.render(FOLDER / kind))
        assert set(re.findall(r"'runAsUser': (\d+), 'runAsGroup': (\d+)", text)) == {tuple(user.split(":"))}


@pytest.fixture
def buildah(tmp_path: Path) -> Callable[..., str]:
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: make tools")
    if os.geteuid() != 0:
        pytest.skip("to make a base for the image needs root")
    storage = ("--storage-driver", "vfs", "--root", tmp_path / "storage", "--runroot", tmp_path / "run")

    def run(*words: object) -> str:
        done = subprocess.run(
            ["buildah", *map(str, (*storage, *words))],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_image_is_built_and_works(buildah: Callable[..., str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    packages = "python3,python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, DEBIAN],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"no base could be made: {made.stdout.splitlines()[-1]}")
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, root, "/")
    buildah("commit", "--quiet", "--rm", container, "localhost/base:1")
    context = tmp_path / "context"
    shutil.copytree(ROOT / "build" / "wheels", context / "dist")
    shutil.copytree(FOLDER, context / "packaging" / "kubernetes")
    arguments = {"BASE": "localhost/base:1", "EXTRAS": "numpy", "PACKAGES": "openssh-server openssh-client"}
    ignored = context / "packaging" / "kubernetes" / "Dockerfile.dockerignore"
    buildah(
        *(
            "build-using-dockerfile",
            "--pull-never",
            "--format",
            "docker",
            "--target",
            "cpu",
            "--tag",
            "localhost/image:1",
        ),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--ignorefile", ignored),
        *("--file", context / "packaging" / "kubernetes" / "Dockerfile", context),
    )
    container = buildah("from", "--pull-never", "localhost/image:1")
    user, check = buildah(
        "inspect", "--format", "{{.Docker.Config.User}}\n{{index .Docker.Config.Healthcheck.Test 1}}", container
    ).splitlines()
    assert user == "1000:1000"
    buildah("run", container, "--", "sh", "-c", check)
    output = buildah("run", container, "--", "hvdrun", "-np", 2, "python", "-c", SUM)
    assert sorted(output.splitlines()) == [f"[{rank}]<stdout>: 1000 [2.]" for rank in (0, 1)]
    keys = tmp_path / "keys"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", keys / "id_rsa"], check=True)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    for path in keys.iterdir():
        path.chmod(0o644)  # as those of a Secret, which belong to root
    volume = f"{keys}:/home/horovodlike/.ssh:ro"
    assert "uid=1000(horovodlike)" in buildah("run", "--volume", volume, container, "--", "sh", "-c", SSH)
