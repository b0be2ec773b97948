"""What `DistributedOptimizer` consists of: how gradients are collected and reduced."""
