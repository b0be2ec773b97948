"""Replaces itself with ``hvdrun`` on a host of a SageMaker training job. Standard library only."""

import json
import os
import sys
from collections.abc import Mapping

_CONFIG = "SM_DISTRIBUTED_CONFIG"


def make_command(environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of ``hvdrun`` and its environment, without the variable that has the key.

    Args:
        environ: The variables that the SDK has set on this host.
    """
    config = json.loads(environ[_CONFIG])
    words = [sys.executable, "-m", "horovodlike.launcher"]
    if config.get("process_count_per_node"):
        words += ["-np", str(config["process_count_per_node"])]
    words += config.get("options") or []
    script = environ["SM_ENTRY_SCRIPT"]
    words += ["--", "bash" if script.endswith(".sh") else sys.executable, script]
    for name, value in json.loads(environ.get("SM_HPS") or "{}").items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    kept = {name: value for name, value in environ.items() if name != _CONFIG}
    return words, {**kept, "HOROVODLIKE_SECRET_KEY": config["secret_key"]}


if __name__ == "__main__":
    words, environ = make_command(os.environ)
    os.execve(words[0], words, environ)
