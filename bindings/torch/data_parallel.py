"""`DataParallel`: one process that splits each batch over several devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from horovodlike.torch._data_parallel import nested
from horovodlike.torch._data_parallel.replicas import Replica, assemble, check_replicable, modules_of
from horovodlike.torch._data_parallel.threads import Threads
from horovodlike.torch._ops import disable_compile

Device = int | str | torch.device


class _ReplicaSet:
    """The replicas of one `DataParallel` and their threads. A forward pass uses them from replication to results."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.threads = Threads(len(devices))
        self.replicas = [Replica(_place(device), device == devices[0]) for device in devices[1:]]


class DataParallel(torch.nn.Module):
    """A module that splits each batch over devices of this process, as `torch.nn.DataParallel` does, also over CPUs.

    The first device applies the module itself, each other device a replica, in a thread of its own, with an equal part
    of the batch. Results, gradients and parameters after a step are as if the module had the whole batch, except for
    layers that look at the batch as a whole: batch normalization sees each device's part, and the module keeps the
    running statistics of the first. Gradients are added in the same order in each run.

    Replicas are kept between steps, and follow all changes of the module. On the device of the module they share the
    memory of its parameters; on others they have copies, which are renewed after a step of the optimizer or any other
    write that autograd counts. Writes through `.data` and by other libraries are not counted: call
    `torch.autograd.graph.increment_version` after these. To give replicas copies on the CPU too, use different names:
    `["cpu:0", "cpu:1"]`.

    All tensors in the arguments, also in nested dicts, lists, tuples and named tuples, are split along `dim` as
    `torch.chunk` does; a batch smaller than the number of devices uses fewer of them. Other arguments go to all
    replicas as they are. Outputs are joined along `dim`; tensors without dimensions become a vector, one value for each
    device in use. Other outputs must be equal. Hooks of the module run once for each device. Attributes that the
    forward pass sets are kept from the first device only.

    Calls by several threads wait for each other. With one device, or none, calls go to the module as they are.

    Args:
        module: The module, with all parameters and buffers on the first device. The keys of `state_dict()` begin with
            `module.`.
        device_ids: Devices: numbers of GPUs, `torch.device`, or their names, such as `["cpu", "cpu"]`. By default all
            GPUs; without a GPU, none.
        output_device: Where the outputs are joined; by default the first device.
        dim: The dimension of the batch.

    Raises:
        TypeError: In forward: the arguments have a `PackedSequence`; outputs cannot be joined; or a module cannot be
            replicated: a compiled one, one of TorchScript, or a `SyncBatchNorm`.
        ValueError: There is no such device. In forward: tensors have no dimension `dim`, or differ in the number of
            their parts; parameters or buffers are not on the first device; or outputs differ in their structure.
        Exception: In forward: the error of a replica, of the same type where it takes a message, which then begins with
            the replica's number and device. Its `__cause__` is the error itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if device_ids is None:
            device_ids = range(torch.cuda.device_count())
        elif len(device_ids) == 0:
            raise ValueError(
                'device_ids is empty: name at least one device, such as ["cpu"], or give None for all GPUs'
            )
        self.module = module
        self.dim = dim
        # By object, as a replica of this one has its attributes. Replicas refer to hooks, and these perhaps to this
        # object: in a dictionary of the module such a circle would never be collected.
        self._replica_sets: WeakKeyDictionary[DataParallel, _ReplicaSet] = WeakKeyDictionary()
        self.device_ids = [_device(each, f"device_ids[{i}]") for i, each in enumerate(device_ids)]
        self.output_device = None if output_device is None else _device(output_device, "output_device")
        if self.output_device is None and self.device_ids:
            self.output_device = self.device_ids[0]
        if len(self.device_ids) == 1:
            self.module.to(_place(self.device_ids[0]))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Apply the module to a batch: see the class."""
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        parts, named = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.module(*parts[0], **named[0])
        try:
            with self._replica_set().lock:
                replicas = self.replicate(self.module, self.device_ids[: len(parts)])
                outputs = self.parallel_apply(replicas, parts, named)
        except Exception:
            raise
        except BaseException:  # replicas may still be at work: the next call must make others
            self._replica_sets.pop(self, None)
            raise
        return self.gather(outputs, self.output_device or self.device_ids[0])

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[torch.device]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Split the arguments into parts for the devices; there may be fewer parts than devices."""
        return nested.scatter(inputs, kwargs, [_place(device) for device in device_ids], self.dim)

    def replicate(self, module: torch.nn.Module, device_ids: Sequence[torch.device]) -> list[torch.nn.Module]:
        """Return the module, and a replica for each other device, as they are until the next call."""
        modules = modules_of(module)
        check_replicable(modules)
        self._check_place(modules)
        return [module, *assemble(self._replica_set().replicas[: len(device_ids) - 1], modules)]

    def parallel_apply(
        self, replicas: Sequence[torch.nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Return the outputs of the replicas, each applied to its arguments in its thread."""
        return self._replica_set().threads.apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Join the outputs of the replicas."""
        return nested.gather(outputs, _place(output_device), self.dim)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_replica_sets", "_compiled_call_impl")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped
        self._replica_sets = WeakKeyDictionary()

    def _replica_set(self) -> _ReplicaSet:
        found = self._replica_sets.get(self)
        if found is not None and found.process != os.getpid():  # after a fork, where its threads are missing
            self._replica_sets.clear()
            found = None
        return found or self._replica_sets.setdefault(self, _ReplicaSet(self.device_ids))

    def _check_place(self, modules: Sequence[torch.nn.Module]) -> None:
        place = _place(self.device_ids[0])
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.device != place:
                    raise ValueError(
                        f"{type(module).__name__}.{name} is on {tensor.device}, but DataParallel needs it on the first "
                        f"of its devices: call module.to({str(place)!r})"
                    )


def _device(given: Device, name: str) -> torch.device:
    """Return the device that a user has named."""
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"{name} is {device}: DataParallel knows GPUs and the CPU")
    count = torch.cuda.device_count()
    current = torch.cuda.current_device() if count else 0
    index = device.index if ":" in str(device) else current
    if index >= count:
        raise ValueError(f"{name} is {device}, but torch finds {count} GPUs; the CPU is 'cpu', as in ['cpu', 'cpu']")
    return torch.device("cuda", index)


def _place(device: torch.device) -> torch.device:
    """Return the device as tensors name it: the CPU has no number there."""
    return torch.device("cpu") if device.type == "cpu" else device


disable_compile(DataParallel.forward)
