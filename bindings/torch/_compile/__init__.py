"""Collectives in functions that `torch.compile` compiles."""
