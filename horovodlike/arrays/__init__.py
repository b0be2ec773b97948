"""Collectives on NumPy arrays and on arrays of any library: what a new framework's binding is written on.

`horovodlike` itself has their names: ``import horovodlike as hvd`` and ``hvd.allreduce(array)``.

* :mod:`horovodlike.arrays.functions`: the collectives; :mod:`horovodlike.arrays.rooted`: those with a root
* :mod:`horovodlike.arrays.messages`: from one rank to another
* :mod:`horovodlike.arrays.operations`: from arrays to requests of the engine, handles, and results
* :mod:`horovodlike.arrays.memory`: an object as address, shape and element type; :mod:`horovodlike.arrays.dlpack`
* :mod:`horovodlike.arrays.fast_path`: small operations that are made again and again

NumPy is imported with the first of these, not with `horovodlike`.
"""
