"""The package where Ray is old or missing, and the packages that do without Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

import horovodlike.ray


def test_an_old_ray_is_refused():
    with pytest.raises(ImportError, match=r"needs Ray 2.51 or later, but 2.9.3 is installed: pip install"):
        horovodlike.ray.check_version("2.9.3")
    horovodlike.ray.check_version("2.51.0")
    horovodlike.ray.check_version("3.0.0.dev0")


def test_without_ray_its_names_say_what_to_install():
    script = """
import sys
sys.modules["ray"] = None
import horovodlike.ray.node_choice
try:
    from horovodlike.ray import RayExecutor
except ImportError as error:
    sys.exit(str(error) != "horovodlike.ray needs Ray: pip install 'horovodlike[ray]'")
sys.exit("there was no error")
"""
    assert subprocess.run([sys.executable, "-P", "-c", script], timeout=60, check=False).returncode == 0


def test_nothing_else_imports_ray():
    script = "import sys, horovodlike, horovodlike.launcher.cli; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", script], timeout=60, check=False).returncode == 0
