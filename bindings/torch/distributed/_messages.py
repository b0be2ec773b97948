"""Messages between two ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from horovodlike._engine import messages, ops
from horovodlike._engine.messages import ANY_SOURCE
from horovodlike.errors import ShutDownError
from horovodlike.torch._ops.loan import address_of
from horovodlike.torch._ops.tensor import DTYPES
from horovodlike.torch.distributed._operations import Operations, copy_all
from horovodlike.torch.distributed._tensors import in_host_memory, one_tensor, to_move
from horovodlike.torch.distributed._work import HvdWork, Operation


class MessageWork(HvdWork):
    """The work of a message that is received, which knows where the message came from.

    Args:
        operation: The receive.
        outputs: The tensor.
        ranks: By place in the group, the ranks of the job.
        sources: The list to which the operation adds the rank of the job that has sent the message.
    """

    def __init__(
        self, operation: Operation, outputs: Sequence[torch.Tensor], ranks: Sequence[int], sources: list[int]
    ) -> None:
        """Wrap a receive in flight."""
        super().__init__((operation,), outputs)
        self._ranks, self._sources = ranks, sources

    def source_rank(self) -> int:
        """Return the place in the group of the rank that has sent the message; -1 if it is not there yet."""
        return self._ranks.index(self._sources[0]) if self._sources else -1

    _source_rank = source_rank


class Messages(Operations):
    """The methods of torch's `ProcessGroup` that send and receive."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> HvdWork:
        """Send a tensor to a rank of the group, which may be this one."""
        tensor = to_move(one_tensor(tensors, "send"), "send")
        peer = self.root_of(dst, "send")
        memory = in_host_memory(tensor)
        operation = self._post(messages.send, memory, peer, tag, tensor, ops.wait_done)
        return self.work_of(operation, None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> HvdWork:
        """Receive a tensor of a rank of the group."""
        return self._receive(tensors, self.root_of(src, "recv"), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HvdWork:
        """Receive a tensor of any rank of the group."""
        return self._receive(tensors, ANY_SOURCE, tag)

    def _receive(self, tensors: Any, peer: int, tag: int) -> HvdWork:
        tensor = to_move(one_tensor(tensors, "recv"), "recv")
        memory = in_host_memory(tensor)
        sources: list[int] = []

        def finish(handle: int) -> None:
            sources.append(messages.wait_message(handle).source)
            copy_all([memory], [tensor])

        operation = self._post(messages.receive, memory, peer, tag, tensor, finish)
        self.note(operation)
        return MessageWork(operation, [tensor], self._team.ranks, sources)

    def _post(
        self,
        post: Callable[..., int],
        memory: torch.Tensor,
        peer: int,
        tag: int,
        tensor: torch.Tensor,
        finish: Callable[[int], object],
    ) -> Operation:
        """Hand the memory of a message to the engine; `finish` consumes the handle of one that is complete."""
        team = self._team
        team.check_open()
        storage = memory.untyped_storage()
        handle = post(
            address_of(memory),
            memory.nbytes,
            DTYPES[memory.dtype],
            peer=peer,
            tag=team.tag_of(tag),
            process_set=team.set_id,
        )

        def describe() -> str:
            who = "any rank" if peer == ANY_SOURCE else f"rank {peer} of the job"
            return f"the message with tag {tag} {'to' if post is messages.send else 'from'} {who}"

        def on_timeout(seconds: float) -> Exception:
            return dist.DistBackendError(f"process group {team.name!r}: Timed out after {seconds:g} s: {describe()}")

        def consume(handle: int, _: torch.UntypedStorage = storage) -> None:  # which keeps the memory until then
            try:
                finish(handle)
            except KeyError:
                raise ShutDownError(f"{describe()} was of the job before the last init(), and is lost") from None

        return Operation(handle, [tensor], team.timeout, on_timeout, consume)
