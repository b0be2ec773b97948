"""Scripts that say ``import horovod.torch as hvd`` run unchanged.

Either of these gives a process Horovod's module names, all of them other names for horovodlike's own modules::

    hvdrun --compat -np 2 python train.py         # the ranks
    python -m horovodlike.compat train.py         # one process
    import horovodlike.compat                     # a line at the top of a script
    horovodlike.compat.install()

Child processes have the names too, whichever way :mod:`multiprocessing` starts them. Other programs that a script
starts do not.

* :mod:`horovodlike.compat.aliases`: which module stands for which, in one table, and the importer that obeys it
* :mod:`horovodlike.compat.horovod`: modules in the shape of Horovod's where horovodlike has none of that shape
* :mod:`horovodlike.compat.program`: runs a script as Python itself would
"""

from horovodlike.compat.aliases import API_VERSION, install

__all__ = ["API_VERSION", "install"]
