"""Sharding of a `tf.data` pipeline over the ranks.

from horovodlike.tensorflow.data import shard

dataset = shard(tf.data.Dataset.from_tensor_slices((x, y))).shuffle(1000).batch(32)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodlike import basics
from horovodlike.process_set import ProcessSet, global_process_set, members, registered_id

__all__ = ["shard"]


def shard(
    dataset: tf.data.Dataset,
    by: str = "elements",
    drop_remainder: bool = True,
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset:
    """Return this rank's share of a dataset that is the same, and in the same order, on all ranks.

    Call it before `shuffle`, `repeat` and `batch`: then elements are samples, and all ranks have the same number of
    batches. With `by="files"`, call it at the end of the pipeline.

    Args:
        dataset: The dataset to divide.
        by: "elements": of each `size()` consecutive elements, every rank receives one. Every rank computes all elements
            of `dataset`, so costly steps should come after this one. "files": each rank reads different files.
            TensorFlow finds the step of the pipeline that reads files, so other steps may come before this one. There
            have to be at least as many files as ranks.
        drop_remainder: With "elements": leave out the last ones if they are too few for all ranks, so that all ranks
            have the same number. If False, the first ranks have one more. With "files" it must be False, as the number
            of elements is not known. Ranks with different numbers of batches need
            `horovodlike.keras.callbacks.JoinCallback`.
        process_set: The ranks that share the dataset.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: An argument cannot be used, this rank is not in the process set, or the pipeline reads no files.
    """
    rank_of_job = basics.rank()
    ranks = members(registered_id(process_set))
    size, rank = len(ranks), ranks.index(rank_of_job)
    if by == "elements":
        if drop_remainder:
            dataset = _whole_rounds(dataset, size)
        return dataset.shard(size, rank)
    if by != "files":
        raise ValueError(f'by must be "elements" or "files", got {by!r}')
    if drop_remainder:
        raise ValueError('by="files" cannot tell how much each rank has: pass drop_remainder=False')
    specs = tf.nest.flatten(dataset.element_spec)
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=size,
            index=rank,
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
            auto_shard_policy=int(tf.data.experimental.AutoShardPolicy.FILE.value),
            num_replicas=size,
        )
    except tf.errors.NotFoundError as error:
        raise ValueError('the dataset reads no files that TensorFlow knows of: shard it by="elements"') from error
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def _whole_rounds(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Leave out the last elements, so that their number is a multiple of the number of ranks."""
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        return dataset
    if count >= 0:
        return dataset.take(count // size * size)
    # The number of elements is not known before they are made: `window` drops the incomplete last round. A window has a
    # dataset for each component of an element. TensorFlow passes the components of a plain tuple as separate arguments,
    # and a named tuple as one argument.
    is_tuple = type(dataset.element_spec) is tuple

    def elements(*parts: Any) -> tf.data.Dataset:
        window = parts if is_tuple else parts[0]
        return window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)

    return dataset.window(size, drop_remainder=True).flat_map(elements)
