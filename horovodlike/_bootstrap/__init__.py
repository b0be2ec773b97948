"""The ranks of a job find each other: the steps of `init()` before the engine starts."""
