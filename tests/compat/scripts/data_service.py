"""Processes of another job compute the input: python -m horovod.tensorflow.data.compute_worker service.json."""

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
dataset = tf.data.Dataset.range(16).map(lambda x: x * x).batch(4)
whole = sorted(x * x for x in range(16))


def read(served):
    return [int(value) for batch in served for value in batch.numpy()]


if config.dispatcher_side == "compute":
    served = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    mine = read(served)
    both = [value for values in hvd.allgather_object(mine) for value in values]
    assert sorted(both) == whole, both  # first come, first served: each element goes to one rank
else:
    with tf_data_service(config, hvd.rank()) as address:
        service = tf.data.experimental.service.distribute("distributed_epoch", address)
        mine = read(dataset.apply(service))
        assert sorted(mine) == whole, mine  # each rank has a dispatcher, and so all elements
        hvd.allreduce(tf.constant(0.0), name="done")

if hvd.rank() == 0:
    config.compute_client(verbose=2).shutdown()
    print("data_service: learned from", len(mine if config.dispatcher_side == "training" else both), "elements")
