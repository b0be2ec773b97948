"""Shares of a `tf.data` pipeline."""

from __future__ import annotations

import collections

import pytest


def _listed(dataset):
    import tensorflow as tf

    return tf.nest.map_structure(int, list(dataset.as_numpy_iterator()))


def _by_elements():
    import tensorflow as tf

    import horovodlike.keras as hvd
    from horovodlike.tensorflow.data import shard

    Pair = collections.namedtuple("Pair", ["x", "y"])
    rank, values = hvd.rank(), list(range(7))
    mine = values[rank:6:2]
    structures = {
        "plain": (tf.data.Dataset.range(7), mine),
        "pair": (tf.data.Dataset.from_tensor_slices(({"a": values}, values)), [({"a": v}, v) for v in mine]),
        "tuple of one": (tf.data.Dataset.from_tensor_slices((values,)), [(v,) for v in mine]),
        "dictionary": (tf.data.Dataset.from_tensor_slices({"a": values}), [{"a": v} for v in mine]),
        "named tuple": (tf.data.Dataset.from_tensor_slices(Pair(values, values)), [Pair(v, v) for v in mine]),
        "named tuple within": (
            tf.data.Dataset.from_tensor_slices({"a": (Pair(values, values),)}),
            [{"a": (Pair(v, v),)} for v in mine],
        ),
    }
    for name, (dataset, expected) in structures.items():
        # With a filter TensorFlow does not know how many there are.
        for pipeline in (dataset, dataset.filter(lambda *_: True)):
            assert repr(_listed(shard(pipeline))) == repr(expected), name  # a named tuple is equal to a plain one
            assert shard(pipeline).element_spec == dataset.element_spec, name
    assert _listed(shard(tf.data.Dataset.range(7), drop_remainder=False)) == values[rank::2]
    assert _listed(shard(tf.data.Dataset.range(1))) == []
    assert _listed(shard(tf.data.Dataset.range(2).repeat()).take(3)) == [rank] * 3
    words = tf.data.Dataset.range(1, 4).map(tf.range).filter(lambda _: True)  # elements of different shapes
    assert [part.tolist() for part in shard(words).as_numpy_iterator()] == [[[0], [0, 1]][rank]]
    alone = hvd.add_process_set([1])
    if rank == 1:
        assert _listed(shard(tf.data.Dataset.range(3), process_set=alone)) == [0, 1, 2]
    else:
        with pytest.raises(ValueError, match="rank 0 is not a member"):
            shard(tf.data.Dataset.range(3), process_set=alone)
    hvd.remove_process_set(alone)


def _by_files(files):
    import tensorflow as tf

    import horovodlike.keras as hvd
    from horovodlike.tensorflow.data import shard

    pipeline = tf.data.TextLineDataset(files).map(tf.strings.to_number).batch(2)
    mine = [batch.tolist() for batch in shard(pipeline, by="files", drop_remainder=False).as_numpy_iterator()]
    assert mine == ([[0.0, 1.0], [4.0, 5.0]] if hvd.rank() == 0 else [[2.0, 3.0]])
    with pytest.raises(ValueError, match="drop_remainder=False"):
        shard(pipeline, by="files")
    with pytest.raises(ValueError, match='by="elements"'):
        shard(tf.data.Dataset.range(4), by="files", drop_remainder=False)
    with pytest.raises(ValueError, match="got 'lines'"):
        shard(pipeline, by="lines")


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
def test_shares(keras_ranks, tmp_path):
    keras_ranks(2).run(_by_elements)
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(f"{2 * number}\n{2 * number + 1}\n")
    keras_ranks(2).run(_by_files, [str(file) for file in files])
