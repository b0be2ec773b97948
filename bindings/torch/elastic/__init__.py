"""Elastic training with PyTorch: ranks come and go, the training continues.

Example::

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)

* :mod:`horovodlike.torch.elastic.state`: `TorchState`, and how it saves values of each type
* :mod:`horovodlike.torch.elastic.sampler`: `ElasticSampler`
"""

from horovodlike.elastic import run
from horovodlike.torch.elastic.sampler import ElasticSampler
from horovodlike.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry

__all__ = ["ElasticSampler", "StateHandler", "TorchState", "get_handler_registry", "run", "set_handler_registry"]
