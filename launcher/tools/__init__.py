"""What `hvdrun` does besides running jobs: `--check-build` and `--selftest`."""
