"""Elastic training: ranks come and go, and the training continues in the processes that are left.

A script keeps the data that must not be lost in a :class:`State`, commits it regularly, and wraps its training
function::

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            ...
            state.step += 1
            state.commit()

    train(hvd.elastic.ObjectState(step=0))

Frameworks have states for their models: ``horovodlike.torch.elastic`` and so on. Of the modules, ``_state`` has the
states, ``_loop`` calls the training function again, ``_membership`` lets the ranks agree at a commit, ``_state_file``
writes commits to disk; :mod:`horovodlike._bootstrap.driver_client` is the connection to the driver in hvdrun.
"""

from horovodlike.elastic._loop import run
from horovodlike.elastic._state import ObjectState, State
from horovodlike.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
