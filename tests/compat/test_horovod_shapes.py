"""Modules that have the shape of Horovod's: `horovod.common` and `horovod.data`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from horovodlike import basics
from horovodlike.compat.horovod import common as util
from horovodlike.compat.horovod.common import HorovodBasics
from horovodlike.data import AsyncDataLoaderMixin, BaseDataLoader


def test_the_class_of_basics() -> None:
    hvd = HorovodBasics("horovod/torch/mpi_ops.py", "mpi_lib")
    assert hvd.rank is basics.rank
    assert hvd.Average == basics.Average
    assert {"init", "size", "Sum"} <= set(dir(hvd))
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    with pytest.raises(AttributeError, match="nothing"):
        _ = hvd.nothing


@pytest.mark.parametrize(
    ("length", "chunks", "sizes"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])]
)
def test_a_list_is_split_evenly(length: int, chunks: int, sizes: list[int]) -> None:
    pieces = util.split_list(list(range(length)), chunks)
    assert [len(piece) for piece in pieces] == sizes
    assert [value for piece in pieces for value in piece] == list(range(length))


def test_versions() -> None:
    assert util.is_version_greater_equal_than("2.10.0+cpu", "2.9.1")
    assert util.is_version_greater_equal_than("2.1", "2.1.0")
    assert not util.is_version_greater_equal_than("2.1.0rc1", "2.1.1")
    with pytest.raises(ValueError, match="form 1.2.3"):
        util.is_version_greater_equal_than("2.1.0", "2.1")


def test_powers_of_two() -> None:
    assert [n for n in range(10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    util.check_num_rank_power_of_2(4)
    with pytest.raises(ValueError, match="not 6"):
        util.check_num_rank_power_of_2(6)


def test_the_environment_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "1")
    monkeypatch.delenv("UNSET_BEFORE", raising=False)
    with pytest.raises(KeyError), util.env(SET_BEFORE=None, UNSET_BEFORE="2"):
        assert "SET_BEFORE" not in os.environ and os.environ["UNSET_BEFORE"] == "2"
        raise KeyError
    assert os.environ["SET_BEFORE"] == "1" and "UNSET_BEFORE" not in os.environ


def test_average_and_op() -> None:
    decide = util.get_average_backwards_compatibility_fun(SimpleNamespace(Average=0, Sum=1))
    assert [decide(None, None), decide(None, True), decide(None, False), decide(4, None)] == [0, 0, 1, 4]
    with pytest.raises(ValueError, match="supersedes average"):
        decide(0, True)


def test_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib")
    assert not util.extension_available("mxnet", verbose=True)
    assert "horovod.mxnet cannot be imported: No module named" in capsys.readouterr().out
    with pytest.raises(ImportError, match="mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    util.check_installed_version("pytorch", "2.13.0")
    with pytest.raises(OSError, match="undefined symbol"):
        util.check_installed_version("pytorch", "2.13.0", OSError("undefined symbol"))
    assert (util.gpu_available("torch"), util.nccl_built()) == (basics.cuda_built(), bool(basics.nccl_built()))
    assert util.mpi_built() == basics.mpi_built()
    assert not util.ddl_built() and not util.ccl_built() and util.gloo_built(verbose=True)


def test_what_can_be_iterated_over() -> None:
    assert util.is_iterable([]) and util.is_iterable("") and not util.is_iterable(3)


class Loader(BaseDataLoader):
    """Counts, and notes in which thread; breaks before the number `wrong`."""

    def __init__(self, length: int, wrong: int = -1) -> None:
        self.length = length
        self.wrong = wrong
        self.threads: set[str] = set()
        self.made = 0
        self.four_made = threading.Event()

    def __len__(self) -> int:
        return self.length

    def _iterate(self) -> Iterator[int]:
        for number in range(self.length):
            self.threads.add(threading.current_thread().name)
            if number == self.wrong:
                raise KeyError(f"before {number}")
            self.made += 1
            if self.made == 4:
                self.four_made.set()
            yield number

    def _process_batch(self, batch: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        return batch * 10


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    """The same in the background."""


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "horovodlike-data"]


@pytest.mark.parametrize("size", [0, 1, 2, 64])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_all_batches_come_in_order_epoch_after_epoch(size: int, length: int) -> None:
    loader = AsyncLoader(size, False, length)
    for _ in range(3):
        assert list(loader) == [number * 10 for number in range(length)]
    assert not ours()
    assert loader.threads <= ({"horovodlike-data"} if size else {"MainThread"})


def test_the_base_class_alone() -> None:
    assert list(Loader(3)) == [0, 10, 20]
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError):
        list(BaseDataLoader())


def test_an_exception_comes_after_the_batches_before_it() -> None:
    loader = AsyncLoader(async_loader_queue_size=1, length=9, wrong=3)
    seen = []
    with pytest.raises(KeyError, match="before 3"):
        for batch in loader:
            seen.append(batch)
    assert seen == [0, 10, 20]
    assert not ours()


def test_it_is_as_far_ahead_as_the_queue_is_long() -> None:
    loader = AsyncLoader(async_loader_queue_size=2, length=100)
    for _ in loader:
        assert loader.four_made.wait(60)
        assert loader.made == 4  # one is here, two are queued, one waits for a place
        break
    loader.close_async_loader()
    assert not ours()
    assert loader.made < 10


def test_closing_ends_the_thread_and_the_loop() -> None:
    loader = AsyncLoader(async_loader_queue_size=1, length=1000)
    seen = []
    for batch in loader:
        seen.append(batch)
        loader.close_async_loader()
        assert not ours()
    assert seen == [0]
    loader.close_async_loader()
    assert next(iter(loader)) == 0
    loader.close_async_loader()


def test_a_new_epoch_ends_the_one_before() -> None:
    loader = AsyncLoader(async_loader_queue_size=1, length=50)
    first = iter(loader)
    assert next(first) == 0
    assert list(loader) == [number * 10 for number in range(50)]
    assert list(first) == []
    assert not ours()
