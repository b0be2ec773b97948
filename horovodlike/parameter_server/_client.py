"""`ParameterServer`: arrays whose elements servers have, as every rank of a process set sees them."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from horovodlike import basics
from horovodlike._engine import parameters
from horovodlike._engine.arguments import check_name, integer
from horovodlike._engine.parameters import Array, Payload, Rows, Update
from horovodlike.arrays.functions import allgather_object, barrier
from horovodlike.arrays.memory import NumpyArray, check_distinct
from horovodlike.errors import MismatchError
from horovodlike.parameter_server import _checkpoint, _rules, _servers
from horovodlike.parameter_server._connections import Address, Client, Connected, facts_of, load_settings
from horovodlike.parameter_server._handles import Handle
from horovodlike.parameter_server._sharding import split
from horovodlike.parameter_server._template import Template, address, in_memory, written
from horovodlike.process_set import ProcessSet, UnnamedCounter, global_process_set, registered_id

Servers = Literal["ranks", "dedicated"]

_unnamed = UnnamedCounter()
_PAYLOADS = {None: Payload.FULL, "bfloat16": Payload.BFLOAT16, "int8": Payload.INT8}
_UPDATES_KEPT = 64
_FLOATS = ("float32", "float64")


class ParameterServer:
    """Arrays whose elements are split evenly among servers.

    Each rank of the process set sends updates to the servers and receives the elements from them, at any time and
    without the other ranks. Server r of n has the next ``count // n`` elements of the arrays, laid one after the other,
    and one more if ``r < count % n``. It carries out the calls of one rank in their order; there is no order between
    ranks. After ``send(...).wait()``, the elements that any rank receives include the update.

    Methods but `close` may be called by any thread. After another `init()`, make a new object.

    Args:
        value: An array, or a list of arrays, of any library, in the memory of the host. All ranks of the process set
            pass the same shapes and element types.
        process_set: The ranks that use it; None: all.
        servers: ``"ranks"``: each rank of the process set serves a part. ``"dedicated"``: the processes that ``hvdrun
            --servers N`` has started beside the ranks. None: these if the job has them, or else the ranks.
        init: The elements at first: ``"root"``, `root`'s elements; or ``"own"``, each rank's own for the part that it
            serves itself.
        root: The global rank for ``init="root"``.
        staleness: The number of ticks that a rank may be ahead of the slowest one; None: `tick` is not used.
        payload: The form in which elements are sent: None, as they are; for float32 and float64 also ``"bfloat16"`` or
            ``"int8"``. The rules that add make up for the rounding: the rounding error is added to the next update.
        name: A name for messages; None: ``parameters.N``.

    Raises:
        ValueError: An argument cannot be used, there are more servers than elements, or horovodlike has not been
            initialized.
        TypeError: `value` is not an array or a list of arrays.
        MismatchError: The ranks disagree about an argument, or another one cannot take part; the message names it.
        RendezvousError: A server cannot be reached.
    """

    def __init__(
        self,
        value: Any,
        *,
        process_set: ProcessSet | None = None,
        servers: Servers | None = None,
        init: Literal["root", "own"] = "root",
        root: int = 0,
        staleness: int | None = None,
        payload: Literal["bfloat16", "int8"] | None = None,
        name: str | None = None,
    ) -> None:
        """Make the parts and fill them. A collective call of all ranks of the process set."""
        self._connected: list[Connected] = []
        self._arrays: list[Array] = []
        self._prefetched: tuple[list[NumpyArray], Handle] | None = None
        self._lock = threading.Lock()  # guards `_prefetched`
        self._updates: dict[Any, tuple[Update, bool]] = {}  # to describe one costs several microseconds
        self._why_closed = "it was not made"
        self._set = global_process_set if process_set is None else process_set
        set_id = registered_id(self._set)
        self.name = f"parameters.{_unnamed.next(set_id)}" if name is None else name
        reports = self._agree(lambda: self._prepare(value, name, servers, init, root, staleness, payload))
        self._check_alike([report[0] for report in reports])
        self._agree(lambda: self._make([report[1] for report in reports], min(report[2] for report in reports)))

    def _agree(self, step: Callable[[], Any]) -> list[Any]:
        """Take a step on all ranks; return the results by rank. If it fails on one rank, all raise an error."""
        problem, made = None, None
        try:
            made = step()
        except Exception as error:
            problem = error
        text = "" if problem is None else f"{type(problem).__name__}: {problem}"
        reports = allgather_object((text, made), process_set=self._set)
        failed = next(((rank, text) for rank, (text, _) in zip(self._ranks, reports, strict=True) if text), None)
        if failed is not None:
            self.end()
            raise problem or MismatchError(f"{self.name}: rank {failed[0]} cannot take part: {failed[1]}")
        return [made for _, made in reports]

    def _prepare(
        self, value: Any, name: Any, servers: Any, init: Any, root: Any, staleness: Any, payload: Any
    ) -> tuple[dict[str, Any], Address | None, int]:
        """Check the arguments, and start to serve; return values to compare, this rank's address, and a number."""
        check_name(name, "ParameterServer")
        self._settings = load_settings()
        template = self._template = Template(value, self.name)
        self._staleness = None if staleness is None else integer(staleness, "staleness", self.name)
        if self._staleness is not None and self._staleness < 0:
            raise ValueError(f"{self.name}: staleness must be 0 or more, got {self._staleness}")
        if payload not in _PAYLOADS:
            raise ValueError(f"{self.name}: payload must be None, 'bfloat16' or 'int8', got {payload!r}")
        narrow = [dtype.name for dtype in template.dtypes if dtype.name not in _FLOATS]
        if payload is not None and narrow:
            raise ValueError(f"{self.name}: payload={payload!r} is for float32 and float64, not for {narrow[0]}")
        self._payload = _PAYLOADS[payload]
        dedicated = _servers.number_of_dedicated()
        if servers not in (None, "ranks", "dedicated"):
            raise ValueError(f"{self.name}: servers must be None, 'ranks' or 'dedicated', got {servers!r}")
        if servers == "dedicated" and not dedicated:
            raise ValueError(f"{self.name}: there are no servers beside the ranks; hvdrun --servers N starts them")
        self._is_dedicated = bool(dedicated) and servers != "ranks"
        self._root = self._checked_root(init, root)
        count = dedicated if self._is_dedicated else len(self._ranks)
        self._parts = split(template.sizes, count, self.name)
        where = None if self._is_dedicated else _servers.serve(self._settings)
        alike = {
            "the shapes": template.shapes,
            "the element types": [dtype.name for dtype in template.dtypes],
            "init and root": (init, self._root),
            "servers": servers,
            "staleness": self._staleness,
            "payload": payload,
        }
        return alike, where, secrets.randbits(62)

    def _checked_root(self, init: Any, root: Any) -> int | None:
        """Return the rank whose elements are the first ones; None if each rank fills the part that it serves."""
        if init not in ("root", "own"):
            raise ValueError(f"{self.name}: init must be 'root' or 'own', got {init!r}")
        if init == "own":
            if self._is_dedicated:
                raise ValueError(f"{self.name}: init='own' needs ranks that serve; use servers='ranks' or init='root'")
            return None
        rank = integer(root, "root", self.name)
        if rank not in self._ranks:
            raise ValueError(f"{self.name}: root={rank} is not one of the ranks {self._ranks}")
        return rank

    def _check_alike(self, reports: Sequence[Mapping[str, Any]]) -> None:
        first = reports[0]
        for rank, theirs in zip(self._ranks, reports, strict=True):
            for what in (each for each in first if theirs[each] != first[each]):
                raise MismatchError(
                    f"{self.name}: {what} differ between the ranks: {first[what]} on rank {self._ranks[0]}, "
                    f"{theirs[what]} on rank {rank}"
                )

    def _make(self, addresses: Sequence[Address | None], number: int) -> None:
        """Connect to the servers, and have them make their parts and fill them."""
        self._why_closed, self._generation = "", basics.generation()
        _servers.add_user(self)
        listed, key = addresses, _servers.key_of_ranks()
        if self._is_dedicated:
            listed, key = _servers.find_dedicated(self._settings), _servers.key_of_dedicated()
        facts = facts_of(basics.place(), self._settings)
        client = Client(f"rank {basics.rank()} on {facts.name}, client of {self.name}", facts, self._settings)
        for where in listed:
            if where is not None:
                self._connected.append(client.connect(where, key))
        for index, (dtype, parts) in enumerate(zip(self._template.dtypes, self._parts, strict=True)):
            shards = [(self._connected[part.server].number, part.size) for part in parts]
            clients = len(self._ranks) if index == 0 and self._staleness is not None else 0
            self._arrays.append(Array(number + index, dtype, shards, clients))
        Handle([array.create() for array in self._arrays]).wait(self._settings.start_timeout)
        if self._root in (None, basics.rank()):
            self._fill()
        self._template.forget()

    def _fill(self) -> None:
        mine, calls = self._ranks.index(basics.rank()), []
        for array, given, parts in zip(self._arrays, self._template.given, self._parts, strict=True):
            memory = in_memory(given).reshape(-1)
            for part in parts:
                if self._root is not None or part.server == mine:
                    elements = memory[part.offset : part.offset + part.size]
                    calls.append(array.send(Update("copy"), part.offset, part.size, address(elements), elements))
        Handle(calls).wait()

    @property
    def _ranks(self) -> list[int]:
        ranks = self._set.ranks
        assert ranks is not None
        return ranks

    # The calls.

    def send(self, value: Any = None, rule: str = "add", **arguments: float) -> Handle:
        """Update the elements with as many others, by a rule that the servers apply.

        Args:
            value: An array or a list of arrays, shaped like the constructor's. It must not be changed before the handle
                is complete. Rule "zero" needs none.
            rule: The name of a rule:

                * ``"zero"``: e = 0; ``"copy"``: e = x; ``"add"``: e += x; ``"max"``, ``"min"``
                * ``"scale_add"`` (`scale`): e += scale * x
                * ``"sgd"`` (`lr`): e -= lr * x
                * ``"momentum"`` (`lr`, `momentum`): v = momentum * v + x; e -= lr * v
                * ``"adam"`` (`lr`, `beta1`, `beta2`, `epsilon`): by Kingma and Ba, https://arxiv.org/abs/1412.6980
                * the rules that `register_rule` has added

            **arguments: The arguments of the rule.

        Raises:
            TypeError: `value` is not an array or a list of arrays.
            ValueError: There is no such rule, it has other arguments, the shapes or element types differ, or this
                object is closed. Nothing was sent.
        """
        arrays = self._open_arrays()
        update, has_payload = self._update(rule, arguments)
        if not has_payload:
            sizes = zip(arrays, self._template.sizes, strict=True)
            return Handle([array.send(update, 0, size, 0, None) for array, size in sizes])
        sent = zip(arrays, self._template.sendable(value, "send"), strict=True)
        return Handle([array.send(update, 0, each.size, address(each), each) for array, each in sent])

    def receive(self, out: Any = None) -> Handle:
        """Receive all elements.

        Args:
            out: An array or a list of arrays for the elements, shaped like the constructor's; None: new ones.

        Returns:
            A handle, whose `wait` returns the array or the list of arrays.

        Raises:
            TypeError: `out` is not an array or a list of arrays.
            ValueError: The shapes or element types differ, an array cannot be written, or this object is closed.
        """
        arrays, template = self._open_arrays(), self._template
        targets = None if out is None else template.writable(out, "receive")
        with self._lock:
            prefetched, self._prefetched = self._prefetched, None
        if targets is None:
            memory, handle = prefetched or self._begin_receive(arrays, template.empty_all())
            return handle.then(lambda _: template.wrap(memory))
        memory, handle = prefetched or self._begin_receive(arrays, [in_memory(each) for each in targets])
        return handle.then(lambda _: written(out, targets, memory))

    def prefetch(self) -> None:
        """Start to receive all elements: the next `receive` returns these. Further calls before it do nothing.

        Raises:
            ValueError: This object is closed.
        """
        arrays = self._open_arrays()
        with self._lock:
            if self._prefetched is None:
                self._prefetched = self._begin_receive(arrays, self._template.empty_all())

    def send_rows(self, indices: Any, rows: Any, rule: str = "add", **arguments: float) -> Handle:
        """Update some rows of the array, such as an embedding's rows. Only for a single array.

        Args:
            indices: The numbers of the rows, in any order: integers in one dimension. A row that occurs twice is
                updated twice.
            rows: An array with these rows, one after the other. It must not be changed before the handle is complete.
            rule: As for `send`. "momentum" and "adam" remember a state for each element; "adam" counts updates by
                blocks of 65536 elements, and sent rows of more than 1 MiB are an update for each part of up to 1 MiB.
            **arguments: The arguments of the rule.

        Raises:
            TypeError: `rows` is not an array, or the indices are not integers.
            ValueError: An index is no row's index, the shape or element type differs, or as for `send`.
        """
        (array, *_) = self._open_arrays()
        update, has_payload = self._update(rule, arguments)
        chosen, shape, length = self._template.rows(indices, "send_rows")
        picked = Rows(address(chosen), chosen.size)
        if not has_payload:
            return Handle([array.send_rows(update, picked, length, 0, None)])
        memory = in_memory(self._template.match(rows, 0, "send_rows", shape))
        return Handle([array.send_rows(update, picked, length, address(memory), memory)])

    def receive_rows(self, indices: Any, out: Any = None) -> Handle:
        """Receive some rows of the array, in the order of `indices`. Only for a single array.

        Args:
            indices: As for `send_rows`.
            out: An array for these rows; None: a new one.

        Raises:
            TypeError: `out` is not an array, or the indices are not integers.
            ValueError: An index is no row's index, the shape or element type differs, or this object is closed.
        """
        (array, *_), template = self._open_arrays(), self._template
        chosen, shape, length = template.rows(indices, "receive_rows")
        picked = Rows(address(chosen), chosen.size)
        target = None if out is None else template.match(out, 0, "receive_rows", shape)
        if target is not None:
            check_distinct([target], "receive_rows")
        memory = template.empty(0, shape) if target is None else in_memory(target)
        handle = Handle([array.receive_rows(picked, length, address(memory), memory)])
        if target is None:
            return handle.then(lambda _: template.wrap([memory]))
        return handle.then(lambda _: written(out, [target], [memory]))

    def tick(self) -> Handle:
        """Advance this rank's clock. The handle is complete when it is no more than `staleness` ahead of the slowest.

        So a rank that waits for each tick, once in every step, is never more than `staleness` steps ahead of another
        rank (stale synchronous parallel, https://papers.nips.cc/paper/4894). A rank whose connection has ended, or that
        has closed its `ParameterServer`, does not count.

        Raises:
            ValueError: `staleness` was not given, or this object is closed.
        """
        (first, *_) = self._open_arrays()
        if self._staleness is None:
            raise ValueError(f"{self.name}: tick() needs staleness=..., which the constructor takes")
        return Handle([first.tick(self._staleness)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the elements and the rules' state to a file. One rank calls it, between updates of the others.

        If it fails, as on a full disk, the file has its old content. It does not depend on the number of servers. If
        others update elements meanwhile, the file mixes values of different moments, and a RuntimeWarning says so.

        Args:
            path: The file, which is replaced if it exists.

        Raises:
            OSError: The file cannot be written.
            HorovodInternalError: A server is lost.
            ValueError: This object is closed.
        """
        if not _checkpoint.save(path, self._open_arrays(), self._template, self._parts):
            warnings.warn(
                f"{self.name}: {os.fspath(path)!r} mixes elements of different moments, because updates came while "
                "save() read them: call hvd.barrier() on all ranks before it and after it",
                RuntimeWarning,
                stacklevel=2,
            )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a file that `save` has written, with any number of servers.

        One rank calls it, between updates of the others.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be read.
            StateFileError: It is damaged, or is no file that `save` has written.
            ValueError: It has other shapes or element types, or this object is closed. Nothing was changed.
            HorovodInternalError: A server is lost.
        """
        _checkpoint.load(path, self._open_arrays(), self._template, self._parts, self.name)

    def _begin_receive(self, arrays: Sequence[Array], memory: list[NumpyArray]) -> tuple[list[NumpyArray], Handle]:
        pairs = zip(arrays, memory, strict=True)
        return memory, Handle([array.receive(0, each.size, address(each), each) for array, each in pairs])

    # The end.

    def close(self) -> None:
        """Free the parts at the servers, and end the connections. A collective call of all ranks of the process set.

        Calls that are not complete fail. A second call does nothing. The end of the job has the same effect.

        Raises:
            HorovodInternalError: The job is broken, or a server is lost; this rank's connections have ended all the
                same.
        """
        if self._why_closed or self._generation != basics.generation() or not basics.is_initialized():
            self.end()
            return
        try:
            try:
                if self._staleness is not None:
                    Handle([self._arrays[0].leave_clocks()]).wait()  # others that are ahead do not wait for this rank
            finally:
                self._remove()
        finally:
            self.end()

    def _remove(self) -> None:
        """Free the parts, together with the other ranks."""
        barrier(process_set=self._set)  # no rank is in the middle of a call any more
        try:
            if basics.rank() == self._ranks[0]:
                Handle([array.remove() for array in self._arrays]).wait()
        finally:
            barrier(process_set=self._set)  # every rank is still there to free its part

    def end(self) -> None:
        """End this rank's connections, without the other ranks; for the end of the job."""
        self._why_closed = self._why_closed or "it was closed"
        self._prefetched = None
        self._arrays = []
        while self._connected:
            parameters.remove_server(self._connected.pop().number)

    def __enter__(self) -> ParameterServer:
        """Return the object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; if an exception leaves the block, without the other ranks, which may not come to its end then."""
        if kind is None:
            self.close()
        else:
            self.end()

    # Checks.

    def _open_arrays(self) -> list[Array]:
        """Return the arrays of the core, which exist as long as the caller has them, also if another thread closes."""
        arrays = self._arrays  # before the check: `end` says that it is closed before it takes them away
        if self._why_closed:
            raise ValueError(f"{self.name} cannot be used: {self._why_closed}; make a new ParameterServer")
        return arrays

    def _update(self, rule: Any, arguments: Mapping[str, Any]) -> tuple[Update, bool]:
        """Return the update for the core, and whether elements are sent with it."""
        key = (rule, *arguments.items()) if arguments else rule
        try:
            return self._updates[key]
        except (KeyError, TypeError):  # TypeError: a value cannot be hashed, which may be valid
            pass
        found = _rules.described(
            rule,
            arguments,
            self._template.dtypes,
            [name for server in self._connected for name in server.rules],
        )
        payload = self._payload if found.has_payload else Payload.FULL
        update = Update(found.name, found.arguments, payload, found.adds and payload != Payload.FULL)
        if len(self._updates) >= _UPDATES_KEPT:
            self._updates.clear()
        with contextlib.suppress(TypeError):
            self._updates[key] = update, found.has_payload
        return update, found.has_payload
