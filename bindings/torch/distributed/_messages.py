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
    """The `Work` of a receive, which also gives the source of the message.

    Args:
        operation: The receive.
        outputs: The tensor, in a list.
        ranks: By place in the group, the ranks in the job.
        sources: The list to which the operation adds the sender's rank in the job.
    """

    def __init__(
        self, operation: Operation, outputs: Sequence[torch.Tensor], ranks: Sequence[int], sources: list[int]
    ) -> None:
        """Wrap a receive in flight."""
        super().__init__((operation,), outputs)
        self._ranks, self._sources = ranks, sources

    def source_rank(self) -> int:
        """Return the sender's place in the group; -1 if the message has not been received yet."""
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
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, self.root_of(src, "recv"), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HvdWork:
        """Receive a tensor from any rank of the group."""
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
        """Give the memory of a message to the engine. When the operation is complete, `finish` consumes its handle."""
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

        def consume(handle: int, _: torch.UntypedStorage = storage) -> None:  # `_` keeps the memory until then
            try:
                finish(handle)
            except KeyError:
                raise ShutDownError(f"{describe()} was of the job before the last init(), and is lost") from None

        return Operation(handle, [tensor], team.timeout, on_timeout, consume)
