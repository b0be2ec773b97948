#!/usr/bin/env python3
"""The `ssh` that the tests put on PATH: it executes the command on this machine, for host names that mean something.

It appends its arguments to `ssh.log` in its own folder, and writes its process id into a file with the host's name.
"""

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
MAGIC = b"\0horovodlike agent\0"


def say(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


def main() -> None:
    host, command = sys.argv[-2:]
    with open(FOLDER / "ssh.log", "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if host == "silent":
        os.read(0, 1)  # it has been asked something
    (FOLDER / host).write_text(str(os.getpid()))
    if host == "unknown":
        say(f"ssh: Could not resolve hostname {host}: Name or service not known", 255)
    if host == "locked":
        say(f"root@{host}: Permission denied (publickey).", 255)
    if host == "bare":
        say("bash: line 1: exec: /opt/python: cannot execute: No such file or directory", 126)
    if host == "empty":
        command = command.replace("start_agent.py", "no_agent.py")
    if host == "silent":
        sys.stdin.read()
    if host == "late":
        time.sleep(2)  # longer than hosts may be silent once the job runs
    if host == "old":
        description = {"version": "0.0.1", "host": {"cpus": [0], "cores": [[0]], "numa_nodes": [[0]], "quota": None}}
        payload = json.dumps({**description, "seen_from": None, "problems": []}).encode()
        os.write(1, MAGIC + b"\x16" + len(payload).to_bytes(4, "big") + bytes(4) + payload)
        sys.stdin.read()
    if host == "noisy":
        os.write(1, b"Welcome to " + host.encode() + MAGIC[:7] + b"\n" + b"mail " * 99)
    environ = {**os.environ, "HOME": f"/home/{host}", "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22"}
    os.execve("/bin/sh", ["sh", "-c", command], environ)


if __name__ == "__main__":
    main()
