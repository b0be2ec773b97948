"""How the ranks of a job find each other: what `init()` does before the engine starts."""
