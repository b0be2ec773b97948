#!/usr/bin/env python3
"""The `flux` that the tests put on PATH: a job runs on this machine, by the name of the host that it asks for.

It knows the options of flux-core's manual pages that `hvdrun` uses and no others, and appends its arguments to
`flux.log` in its own folder. The answer of `flux resource list` is in a file there.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIST = ["resource", "list", "--states=up", "--no-header", "--format={nodelist} {rlist}"]
OF_RUN = {"--nodes", "--ntasks", "--exclusive", "--requires", "--setopt", "--unbuffered"}


def fail(text: str, code: int = 1) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


def run(words: list[str]) -> None:
    count = next(number for number, word in enumerate(words) if not word.startswith("-"))
    given = [word.partition("=")[::2] for word in words[:count]]
    if unknown := [name for name, _ in given if name not in OF_RUN]:
        fail(f"flux-run: error: unrecognized arguments: {unknown[0]}", 2)
    options = dict(given)
    if options["--nodes"] != "1" or options["--ntasks"] != "1" or not options["--requires"].startswith("host:"):
        fail("flux-run: ERROR: [Errno 22] an agent is one task on one host")
    if "--unbuffered" not in options:
        fail("flux-run: a frame without a newline would wait")
    environ = {**os.environ, "FLUX_JOB_ID": "f2Nzy9CbX", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}
    if ("--setopt", "gpu-affinity=off") not in given:
        environ["CUDA_VISIBLE_DEVICES"] = "0"
    os.execve(words[count], words[count:], environ)


def main() -> None:
    words = sys.argv[1:]
    with open(FOLDER / "flux.log", "a") as log:
        log.write(json.dumps(words) + "\n")
    if words == LIST:
        try:
            print((FOLDER / "resource_list").read_text(), end="")
        except OSError as error:
            fail(f"flux-resource: ERROR: {error.filename}: {error.strerror}")
    elif words[0] == "run":
        run(words[1:])
    else:
        fail(f"flux: {words[0]} is not a flux command", 2)


if __name__ == "__main__":
    main()
