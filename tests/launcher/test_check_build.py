from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from horovodlike.launcher import check_build as module


def test_the_block() -> None:
    lines = module.check_build().splitlines()
    assert lines[0].startswith("horovodlike v")
    assert lines[0].endswith(":")
    assert [line for line in lines if line and not line.startswith(" ")][1:] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    assert "    [X] Shared memory (one machine)" in lines
    assert all(line[:8] in ("    [X] ", "    [ ] ") for line in lines if line.startswith(" "))


def test_a_framework_without_its_binding_is_not_available() -> None:
    works, name, remark = module._framework("Email", "email", "email", ("no-such-distribution",))
    assert (works, name) == (False, "Email")
    assert "no binding" in remark
    assert module._framework("None", "no_such_module", "torch", ()) == (False, "None", "not installed")
    assert module._framework("Email", "email", "launcher", ("no-such-distribution",))[0]


def test_no_framework_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from horovodlike.launcher.cli import main\n"
        "try: main(['--check-build'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'tensorflow', 'keras', 'mpi4py', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"horovodlike v")
