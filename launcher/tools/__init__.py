"""The tasks of `hvdrun` besides running jobs: `--check-build` and `--selftest`."""
