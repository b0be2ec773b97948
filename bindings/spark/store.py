"""Stores: where estimators keep the data that they train on, checkpoints and logs, on any file system of fsspec."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from horovodlike.errors import ConfigError

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]


class Store:
    """A folder that the driver, Spark and all executors reach by the same name. Can be pickled.

    Under the prefix are ``intermediate_train_data``, ``intermediate_val_data``, ``intermediate_test_data``, and
    ``runs/<run_id>`` with ``checkpoint`` and ``logs``.

    Args:
        prefix_path: The folder: a path, or a URL of a file system of fsspec, such as ``s3://bucket/folder``.
        train_path: Another folder for the training data.
        val_path: Another folder for the validation data.
        test_path: Another folder for the test data.
        runs_path: Another folder for checkpoints and logs.
        save_runs: Whether checkpoints are kept.
        storage_options: Arguments of the file system, as for fsspec, such as keys.

    Raises:
        ConfigError: fsspec, or its driver for this file system, is not installed.
        ValueError: The prefix is empty, or fsspec does not know the file system.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not prefix_path:
            raise ValueError("a store needs a folder: Store.create('/shared/folder')")
        self.prefix_path = self._normalized(str(prefix_path))
        self.storage_options = dict(storage_options or {})
        self._train = train_path or self._below("intermediate_train_data")
        self._val = val_path or self._below("intermediate_val_data")
        self._test = test_path or self._below("intermediate_test_data")
        self._runs = runs_path or self._below("runs")
        self._save_runs = save_runs
        self.filesystem()

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for a prefix: :class:`DBFSLocalStore`, :class:`HDFSStore` or :class:`FilesystemStore`."""
        kinds: tuple[type[Store], ...] = (DBFSLocalStore, HDFSStore, FilesystemStore)
        return next(kind for kind in kinds if kind.matches(str(prefix_path)))(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, prefix_path: str) -> bool:
        """Return whether this class is the one for a prefix."""
        return True

    def _normalized(self, prefix_path: str) -> str:
        return prefix_path if "://" in prefix_path else os.path.abspath(prefix_path)

    def _below(self, name: str) -> str:
        return f"{self.prefix_path.rstrip('/')}/{name}"

    def filesystem(self) -> Any:
        """Return the file system, of fsspec; a path of this store is a path of it after :meth:`strip`."""
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(f"stores need fsspec: pip install 'horovodlike[spark]' ({error})") from error
        try:
            return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]
        except ImportError as error:
            raise ConfigError(f"the store {self.prefix_path} cannot be used: {error}") from error

    def strip(self, path: str) -> str:
        """Return a path without the file system's protocol."""
        return str(self.filesystem()._strip_protocol(path))

    def spark_path(self, path: str) -> str:
        """Return the name by which Spark knows a path."""
        scheme = urlsplit(path).scheme
        if not scheme:
            return f"file://{path}"
        return f"s3a{path[2:]}" if path.startswith("s3://") else path

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """Return the folder of the training data; ``idx`` distinguishes data sets."""
        return self._train if idx is None else f"{self._train}.{idx}"

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """Return the folder of the validation data."""
        return self._val if idx is None else f"{self._val}.{idx}"

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """Return the folder of the test data."""
        return self._test if idx is None else f"{self._test}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether checkpoints are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._runs

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return f"{self._runs}/{run_id}"

    def get_checkpoint_filename(self) -> str:
        """Return the name of a checkpoint in the folder of its run."""
        return "checkpoint"

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the file of a run's last checkpoint."""
        return f"{self.get_run_path(run_id)}/{self.get_checkpoint_filename()}"

    def get_checkpoints(self, run_id: str, suffix: str = "") -> list[str]:
        """Return the files in the folder of a run whose names begin as a checkpoint's and end with ``suffix``."""
        found = self.filesystem().glob(f"{self.strip(self.get_checkpoint_path(run_id))}*{suffix}")
        return sorted(map(str, found))

    def get_logs_subdir(self) -> str:
        """Return the name of the logs in the folder of their run."""
        return "logs"

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}"

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder."""
        return bool(self.filesystem().exists(self.strip(path)))

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return bytes(self.filesystem().cat_file(self.strip(path)))

    def write(self, path: str, data: bytes) -> None:
        """Replace a file: a reader finds the old content or the new one, if the file system moves files as a whole."""
        filesystem, target = self.filesystem(), self.strip(path)
        filesystem.makedirs(os.path.dirname(target), exist_ok=True)
        beside = f"{target}.new"
        filesystem.pipe_file(beside, data)
        filesystem.mv(beside, target)

    def write_text(self, path: str, text: str) -> None:
        """Replace a file by a text in UTF-8."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all that is in it; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem().rm(self.strip(path), recursive=True)

    def parquet_files(self, path: str) -> list[str]:
        """Return the Parquet files of a folder, by name."""
        return sorted(map(str, self.filesystem().glob(f"{self.strip(path)}/**/*.parquet")))

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a folder has Parquet files."""
        return self.exists(path) and bool(self.parquet_files(path))

    def get_parquet_dataset(self, path: str) -> Any:
        """Return a folder of Parquet files as a ``pyarrow.dataset.Dataset``."""
        from pyarrow import dataset

        return dataset.dataset(self.parquet_files(path), filesystem=self.filesystem(), format="parquet")

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Return a function that makes a local folder for a ``with`` block, whose name it yields."""

        @contextlib.contextmanager
        def local_output() -> Iterator[str]:
            with tempfile.TemporaryDirectory(prefix=f"{run_id}-") as folder:
                yield folder

        return local_output

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the content of a local folder to the folder of a run."""

        def sync(folder: str) -> None:
            self.filesystem().put(f"{folder.rstrip('/')}/", f"{self.strip(self.get_run_path(run_id))}/", recursive=True)

        return sync


class FilesystemStore(Store):
    """A store on a local or shared folder, or on any file system that fsspec has a driver for."""


class LocalStore(FilesystemStore):
    """Horovod's earlier name of a :class:`FilesystemStore` on a folder."""


class HDFSStore(FilesystemStore):
    """A store on HDFS, through pyarrow's driver, which needs Hadoop's native library on all hosts."""

    @classmethod
    def matches(cls, prefix_path: str) -> bool:
        """See :meth:`Store.matches`."""
        return prefix_path.startswith("hdfs://")


class DBFSLocalStore(FilesystemStore):
    """A store on the file system of Databricks, which its clusters mount at ``/dbfs``."""

    @classmethod
    def matches(cls, prefix_path: str) -> bool:
        """See :meth:`Store.matches`."""
        return prefix_path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    def _normalized(self, prefix_path: str) -> str:
        for prefix in ("dbfs:/", "file:///dbfs/", "/dbfs/"):
            if prefix_path.startswith(prefix):
                return f"/dbfs/{prefix_path[len(prefix) :].lstrip('/')}"
        raise ValueError(f"{prefix_path} is no path on the file system of Databricks, such as dbfs:/folder")

    def spark_path(self, path: str) -> str:
        """See :meth:`Store.spark_path`."""
        return f"dbfs:/{path.removeprefix('/dbfs/')}"
