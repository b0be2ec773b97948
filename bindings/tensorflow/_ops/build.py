"""Find the shared library with the ops; on first import, compile it against the installed TensorFlow.

TensorFlow's C++ interface changes with every release, so a compiled library works with one version only. It is kept in
the user's cache folder, or beside this file if `horovodlike.tensorflow.build` has compiled it. Its name has a hash of
the sources, the version of TensorFlow, the compiler's flags and the machine type.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

import horovodlike

__all__ = ["build", "library"]

PACKAGE = Path(__file__).parent
_CORE = Path(horovodlike.__file__).parent
_SOURCES = ("ops.cc", "collective.h", "completions.h", "rank_info.h", "requests.h")
_COMPILERS = ("g++", "c++", "clang++")


def library() -> Path:
    """Return the path of the shared library with the ops, and compile it if it does not exist.

    If several processes call this at the same time, such as the ranks of a job, one compiles and the others wait.

    Raises:
        ImportError: The library cannot be compiled, or cannot be stored; the message names the remedy.
    """
    name = f"{_key()}.so"
    for folder in (PACKAGE, _cache()):
        if (folder / name).exists():
            return folder / name
    return build(_cache())


def build(folder: Path) -> Path:
    """Compile the ops into a folder, unless it has them already, and return the path of the shared library.

    Raises:
        ImportError: As `library`.
    """
    target = folder / f"{_key()}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(target)
    except OSError as error:
        raise ImportError(
            f"horovodlike.tensorflow cannot keep its compiled ops in {folder}: {error}. Set XDG_CACHE_HOME to a folder "
            "that can be written to, or run `python -m horovodlike.tensorflow.build` as a user who may write there"
        ) from error
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "horovodlike"


def _key() -> str:
    content = hashlib.sha256()
    for source in (*(PACKAGE / name for name in _SOURCES), _CORE / "include" / "hvl.h"):
        content.update(source.read_bytes())
    content.update(" ".join((tf.version.GIT_VERSION, *_flags(), platform.machine())).encode())
    return f"tensorflow-{tf.version.VERSION}-{content.hexdigest()[:16]}"


def _flags() -> list[str]:
    # Include folders are left out: they may differ between the machine that compiles and the one that imports.
    return [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # unlocked by close()
        yield


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    found = chosen or next(filter(shutil.which, _COMPILERS), None)
    if found is None or shutil.which(found) is None:
        raise ImportError(
            f"horovodlike.tensorflow compiles its ops for TensorFlow {tf.version.VERSION} on first import, and "
            + (f"the compiler that CXX names, {chosen}, does not exist" if chosen else "there is no C++ compiler")
            + ": install g++ (for instance `apt-get install g++` or `conda install gxx`), or run `python -m "
            "horovodlike.tensorflow.build` when the image is made, where there is one"
        )
    return found


def _compile(target: Path) -> None:
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    command = [
        *(_compiler(), "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        *(*_flags(), "-isystem", tf.sysconfig.get_include(), f"-I{_CORE / 'include'}"),
        *(str(PACKAGE / "ops.cc"), "-o", unfinished),
        # No path is needed at run time: the package has loaded this library before.
        *(f"-L{_CORE / 'lib'}", "-l:libhorovodlike.so"),
        *tf.sysconfig.get_link_flags(),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ImportError(
                f"horovodlike.tensorflow could not compile its ops for TensorFlow {tf.version.VERSION}. The command\n"
                f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}"
            )
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
