"""The parts of `DistributedOptimizer`: how gradients are collected and reduced."""
