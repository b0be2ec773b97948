"""Collectives on NumPy arrays and on arrays of any library; the base for bindings of new frameworks.

`horovodlike` itself exports them: ``import horovodlike as hvd`` and ``hvd.allreduce(array)``.

* :mod:`horovodlike.arrays.functions`: the collectives; :mod:`horovodlike.arrays.rooted`: collectives with a root
* :mod:`horovodlike.arrays.messages`: messages from one rank to another
* :mod:`horovodlike.arrays.hierarchy`: process sets by keys of the ranks, in levels
* :mod:`horovodlike.arrays.operations`: from arrays to requests of the engine, handles, and results
* :mod:`horovodlike.arrays.memory`, with :mod:`horovodlike.arrays.dlpack`: the address, shape and dtype of an array
* :mod:`horovodlike.arrays.fast_path`: allreduces that are repeated
* :mod:`horovodlike.arrays.consistency`: whether the ranks hold the same model; for the bindings

These modules import NumPy; `horovodlike` imports them only when they are used.
"""
