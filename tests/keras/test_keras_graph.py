"""`DistributedOptimizer` in a function that TensorFlow traces."""

from __future__ import annotations

import numpy as np
import pytest


def _several_applies_in_a_graph(name):
    """Each reduction has a name of its own, as the graph runs them in any order."""
    import keras
    import tensorflow as tf

    import horovodlike.keras as hvd

    def variable():
        return keras.Variable(np.zeros(2), dtype="float32", name="kernel")

    wrapped = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), name=name) for _ in range(2)]
    variables = [[variable(), variable()] for _ in wrapped]
    for optimizer, those in zip(wrapped, variables, strict=True):
        optimizer.build(those)

    @tf.function
    def step(mine):
        with tf.name_scope(f"scope_of_rank_{hvd.rank()}"):  # no part of what the ranks match
            for optimizer, (first, second) in zip(wrapped, variables, strict=True):
                optimizer.apply([tf.fill([2], mine)], [first])
                if mine > 0:
                    optimizer.apply([tf.fill([2], 10 * mine)], [second])

    mine = tf.constant(hvd.rank() + 1.0)
    for _ in range(3):
        step(mine)
    values = [[those.numpy().tolist() for those in pair] for pair in variables]
    assert values == [[[-4.5, -4.5], [-45.0, -45.0]]] * 2
    graph = step.get_concrete_function(mine).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return sorted(node.attr["description"].s for node in nodes if node.op == "HorovodlikeAllreduce")


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
@pytest.mark.parametrize("name", (None, "same"))
def test_each_reduction_in_a_graph_has_its_own_name(keras_ranks, name):
    first, second = keras_ranks(2).run(_several_applies_in_a_graph, name)
    assert len(first) == len(set(first)) == 4
    assert first == second
