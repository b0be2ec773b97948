"""The program that a rank of ``horovodlike.run`` executes: ``python run_task.py``.

The function arrives in a file in memory (a memfd), and its result leaves through a pipe. Both are inherited
descriptors that no other user and no network can reach, so they may carry pickles.
"""

import os
import sys

# Python puts a script's folder on the search path. Remove it; the search path of `run()` arrives with the task.
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

import json  # noqa: E402 - after the search path was cleared of this folder
import pickle  # noqa: E402
import struct  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

LENGTH = struct.Struct(">I")
SEARCH_PATH = "HOROVODLIKE_SEARCH_PATH"
"""The variable with a search path, as JSON, that comes before the task's search path."""


def pack_answer(raised: str, content: bytes) -> bytes:
    """Encode a rank's answer: the class name of the exception that the function has raised, or ""; and a pickle."""
    name = raised.encode()
    return LENGTH.pack(len(name)) + name + content


def unpack_answer(answer: bytes | bytearray) -> tuple[str, bytes]:
    """Return the exception's name and the pickle of an answer; both are empty if the answer is too short."""
    if len(answer) < LENGTH.size:
        return "", b""
    (length,) = LENGTH.unpack_from(answer)
    return answer[LENGTH.size : LENGTH.size + length].decode(), bytes(answer[LENGTH.size + length :])


def _read_task(descriptor: int) -> bytes:
    """Read the whole file by offsets: all ranks share one open file description, and with it the position."""
    size = os.fstat(descriptor).st_size
    data = bytearray()
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    os.close(descriptor)
    return bytes(data)


def _dumps(value: Any) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]  # from the caller's search path

    return bytes(cloudpickle.dumps(value))


def _dumps_result(result: Any) -> bytes:
    try:
        return _dumps(result)
    except Exception as error:
        rank = os.environ.get("HOROVODLIKE_RANK")  # a worker of an elastic job that has not called init() has none
        where = "" if rank is None else f" on rank {rank}"
        raise TypeError(f"what the function has returned{where} cannot be sent: {error}") from error


def _describe(error: BaseException) -> bytes:
    """Return the answer for an exception: itself (None if it cannot be pickled), its traceback and its repr."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sent: bytes | None
    try:
        sent = data = _dumps(error.with_traceback(None))
        pickle.loads(data)  # many exceptions can be pickled but not unpickled
    except Exception:
        sent = None
    return pack_answer(type(error).__name__, pickle.dumps((sent, text, repr(error))))


def _execute(task: bytes) -> tuple[bytes, int]:
    try:
        function, args, kwargs = pickle.loads(task)
        result = function(*args, **kwargs)
        return pack_answer("", _dumps_result(result)), 0
    except Exception as error:
        return _describe(error), 1


def main() -> None:
    """Run the function, write its answer, and exit."""
    task_fd, result_fd = int(os.environ.pop("HOROVODLIKE_TASK_FD")), int(os.environ.pop("HOROVODLIKE_RESULT_FD"))
    for descriptor in (task_fd, result_fd):
        os.set_inheritable(descriptor, False)
    task = _read_task(task_fd)
    (length,) = LENGTH.unpack_from(task)
    search_path: list[Any] = json.loads(task[LENGTH.size : LENGTH.size + length])
    first: list[Any] = json.loads(os.environ.pop(SEARCH_PATH, "[]"))  # set by a process that has called in
    sys.path[:] = [*first, *(entry for entry in search_path if entry not in first)]
    answer, code = _execute(task[LENGTH.size + length :])
    with os.fdopen(result_fd, "wb") as file:
        file.write(answer)
    sys.exit(code)


if __name__ == "__main__":
    main()
