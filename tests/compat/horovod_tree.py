"""Horovod 0.28.1: its modules, and the names that its documentation, examples and tests use of them."""

from __future__ import annotations

_TREE = """
horovod
horovod._keras: callbacks elastic
horovod.common: basics elastic exceptions process_sets util
horovod.data: data_loader_base
horovod.keras: callbacks elastic
horovod.mxnet: compression functions mpi_ops
horovod.ray: adapter driver_service elastic elastic_v2 ray_logger runner strategy utils worker
horovod.runner: gloo_run js_run launch mpi_run run_task task_fn
horovod.runner.common
horovod.runner.common.service: compute_service driver_service task_service
horovod.runner.common.util: address codec config_parser env host_hash hosts network safe_shell_exec
horovod.runner.common.util: secret settings timeout tiny_shell_exec
horovod.runner.driver: driver_service
horovod.runner.elastic: constants discovery driver registration rendezvous settings worker
horovod.runner.http: http_client http_server
horovod.runner.task: task_service
horovod.runner.util: cache lsf network remote streams threads
horovod.spark: conf gloo_run mpi_run runner
horovod.spark.common: backend cache constants datamodule estimator params serialization store util
horovod.spark.data_loaders: pytorch_data_loaders
horovod.spark.driver: driver_service host_discovery job_id mpirun_rsh rendezvous rsh
horovod.spark.keras: bare datamodule estimator optimizer remote tensorflow util
horovod.spark.lightning: datamodule estimator legacy remote util
horovod.spark.task: gloo_exec_fn mpirun_exec_fn task_info task_service
horovod.spark.tensorflow: compute_worker
horovod.spark.torch: datamodule estimator remote util
horovod.tensorflow: compression elastic functions gradient_aggregation gradient_aggregation_eager
horovod.tensorflow: mpi_ops sync_batch_norm util
horovod.tensorflow.data: compute_service compute_worker
horovod.tensorflow.keras: callbacks elastic
horovod.torch: compression functions mpi_ops optimizer sync_batch_norm
horovod.torch.elastic: sampler state
"""


def _modules() -> tuple[str, ...]:
    found = set()
    for line in _TREE.strip().splitlines():
        package, _, below = line.partition(":")
        found |= {package, *(f"{package}.{name}" for name in below.split())}
    return tuple(sorted(found))


MODULES = _modules()

_BASICS = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
"""
_PROCESS_SETS = "ProcessSet global_process_set add_process_set remove_process_set"
_OPERATIONS = "Average Sum Adasum Min Max Product"
_KERAS = """
init shutdown size local_size rank local_rank Average Sum Compression DistributedOptimizer broadcast_global_variables
allreduce allgather broadcast reducescatter load_model callbacks elastic
"""
_KERAS_CALLBACKS = """
BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
BestModelCheckpoint
"""
_KERAS_ELASTIC = "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"
_OBJECTS = "broadcast_object allgather_object"

NAMES: dict[str, list[str]] = {
    module: names.split()
    for module, names in {
        "horovod": "run __version__",
        "horovod.runner": "run",
        "horovod.common.basics": "HorovodBasics",
        "horovod.common.elastic": "State ObjectState",
        "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
        "horovod.common.process_sets": f"{_PROCESS_SETS} _basics",
        "horovod.common.util": """
            check_extension extension_available gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built env
            get_average_backwards_compatibility_fun num_rank_is_power_2 split_list is_iterable
            is_version_greater_equal_than check_num_rank_power_of_2 check_installed_version
        """,
        "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
        "horovod.data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
        "horovod.torch": f"""
            {_BASICS} {_PROCESS_SETS} {_OPERATIONS} {_OBJECTS} elastic Compression broadcast_optimizer_state
            broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
            grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather
            allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_
            broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
            grouped_reducescatter_async join barrier poll synchronize HorovodInternalError DistributedOptimizer
            SyncBatchNorm gpu_available check_extension
        """,
        "horovod.torch.mpi_ops": "is_homogeneous _basics gpu_available check_extension",
        "horovod.torch.elastic": "run TorchState ElasticSampler",
        "horovod.torch.elastic.sampler": "ElasticSampler",
        "horovod.torch.elastic.state": "TorchState get_handler_registry set_handler_registry",
        "horovod.torch.functions": f"{_OBJECTS} broadcast_optimizer_state broadcast_parameters",
        "horovod.torch.optimizer": "DistributedOptimizer",
        "horovod.torch.compression": "Compression",
        "horovod.torch.sync_batch_norm": "SyncBatchNorm",
        "horovod.tensorflow": f"""
            {_BASICS} {_PROCESS_SETS} {_OPERATIONS} {_OBJECTS} is_homogeneous rank_op local_rank_op size_op
            local_size_op process_set_included_op Compression allreduce grouped_allreduce allgather grouped_allgather
            broadcast broadcast_ alltoall reducescatter grouped_reducescatter join broadcast_variables
            broadcast_object_fn broadcast_global_variables BroadcastGlobalVariablesHook DistributedOptimizer
            DistributedGradientTape PartialDistributedGradientTape LocalGradientAggregationHelper
            SyncBatchNormalization elastic check_num_rank_power_of_2 handle_average_backwards_compatibility
            _executing_eagerly _make_subgraph util gpu_available check_extension
        """,
        "horovod.tensorflow.mpi_ops": "_basics gpu_available check_extension",
        "horovod.tensorflow.util": "_executing_eagerly _make_subgraph _cache vars_to_refs refs_to_vars",
        "horovod.tensorflow.elastic": "run TensorFlowKerasState TensorFlowState",
        "horovod.tensorflow.keras": f"{_KERAS} ProcessSet add_process_set remove_process_set",
        "horovod.tensorflow.keras.callbacks": _KERAS_CALLBACKS,
        "horovod.tensorflow.keras.elastic": _KERAS_ELASTIC,
        "horovod.keras": f"{_KERAS} Adasum global_process_set PartialDistributedOptimizer",
        "horovod.keras.callbacks": _KERAS_CALLBACKS,
        "horovod.keras.elastic": _KERAS_ELASTIC,
        "horovod.ray": "RayExecutor ElasticRayExecutor",
        "horovod.ray.elastic": "ElasticRayExecutor",
        "horovod.ray.elastic_v2": "ElasticRayExecutor",
        "horovod.ray.runner": "RayExecutor",
        "horovod.spark": "run run_elastic",
        "horovod.spark.task": "get_available_devices",
        "horovod.spark.common.store": "Store FilesystemStore LocalStore HDFSStore DBFSLocalStore",
        "horovod.spark.common.backend": "Backend SparkBackend",
        "horovod.spark.keras": "KerasEstimator KerasModel",
        "horovod.spark.keras.estimator": "KerasEstimator KerasModel",
        "horovod.spark.torch": "TorchEstimator TorchModel",
        "horovod.spark.torch.estimator": "TorchEstimator TorchModel",
    }.items()
}
"""The names by module, of the modules that scripts import."""
