"""horovodlike on Spark: functions on the executors of a cluster, and estimators that train on DataFrames.

Needs the extra ``spark``. :mod:`horovodlike.spark.torch` and :mod:`horovodlike.spark.keras` have the estimators. Of the
modules, ``runner`` has :func:`run` and :func:`run_elastic`, ``_driver`` submits the jobs, ``_task`` runs on executors,
and ``_output`` carries the output of ranks from executors to the driver.
"""

from horovodlike.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
