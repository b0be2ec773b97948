"""Data loaders that prepare batches in a background thread.

Your own loader implements the iteration; the mixin, as the first base class, runs it in the background::

    class Loader(BaseDataLoader):
        def __len__(self): ...
        def _iterate(self): ...

    class AsyncLoader(AsyncDataLoaderMixin, Loader):
        pass
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_log = logging.getLogger(__name__)


class BaseDataLoader:
    """The interface of a loader of batches."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Process a batch before the training loop receives it. Called in the thread of the training loop."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, processed."""
        for batch in self._iterate():
            yield self._process_batch(batch)


@dataclass(frozen=True)
class _End:
    """The last item in a queue: the epoch is over, or has failed with an error."""

    error: BaseException | None = None


class _Epoch:
    """One pass over the batches, in a thread of its own that puts them into a queue of limited size."""

    def __init__(self, iterate: Callable[[], Iterable[Any]], size: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(iterate,), daemon=True, name="horovodlike-data")
        self._thread.start()

    def _produce(self, iterate: Callable[[], Iterable[Any]]) -> None:
        end = _End()
        try:
            for batch in iterate():
                if self._stopped.is_set():
                    break
                self._queue.put(batch)
        except BaseException as error:
            end = _End(error)
        self._queue.put(end)

    def __iter__(self) -> Iterator[Any]:
        while not isinstance(item := self._queue.get(), _End):
            yield item
        self._queue.put(item)  # so that another iteration ends, too
        if item.error is not None:
            raise item.error

    def close(self) -> None:
        """End the thread. It may be waiting for room in the queue, so this takes all items out, up to the last one."""
        self._stopped.set()
        while not isinstance(self._queue.get(), _End):
            pass
        self._thread.join()
        self._queue.put(_End())  # for an iteration that has not ended


class AsyncDataLoaderMixin:
    """A mixin that prepares batches in a background thread; to be the first base class of a loader.

    Each epoch has a thread of its own, which ends with the epoch, or when the loop over the epoch is left. A new epoch
    ends the previous one. An exception in ``_iterate`` is raised in the training loop.

    Args:
        async_loader_queue_size: How many batches are prepared ahead; with 0 there is no thread.
        debug_data_loader: Log the beginning and the end of each epoch (``logging``, level info).
        *args: For the next base class.
        **kwargs: For the next base class.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Start nothing yet."""
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._epoch: _Epoch | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread, if there is one, and drop the batches that it has prepared."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, processed."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        self._say("begins")
        self._epoch = epoch = _Epoch(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]
        try:
            for batch in epoch:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            if self._epoch is epoch:
                self.close_async_loader()
            self._say("ends")

    def _say(self, what: str) -> None:
        if self.debug_data_loader:
            _log.info("an epoch %s; %d batches are prepared ahead", what, self.async_loader_queue_size)
