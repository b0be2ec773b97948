"""The program that a rank of ``horovodlike.run`` executes: ``python run_task.py``.

The function arrives in a file of this job's memory and its result leaves through a pipe. Both are inherited
descriptors, which no other user and no network can reach; that is why they may carry pickles.
"""

import os
import sys

# Started by its path, so that it needs no search path before it has got the caller's.
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

import json  # noqa: E402 - after the search path was cleared of this folder
import pickle  # noqa: E402
import struct  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

LENGTH = struct.Struct(">I")


def pack_answer(raised: str, content: bytes) -> bytes:
    """Encode a rank's answer: the class name of the exception that the function has raised, or ""; and a pickle."""
    name = raised.encode()
    return LENGTH.pack(len(name)) + name + content


def unpack_answer(answer: bytes | bytearray) -> tuple[str, bytes]:
    """Return the two parts of an answer; of one that is cut short, empty ones."""
    if len(answer) < LENGTH.size:
        return "", b""
    (length,) = LENGTH.unpack_from(answer)
    return answer[LENGTH.size : LENGTH.size + length].decode(), bytes(answer[LENGTH.size + length :])


def _read_task(descriptor: int) -> bytes:
    """Read the whole file, from the start: all ranks share one description and its offset."""
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
    """Pickle an exception: itself if that can be sent, and its traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sent: bytes | None
    try:
        sent = data = _dumps(error.with_traceback(None))
        pickle.loads(data)  # many exceptions can be written but not read
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
    """Run the function and exits."""
    task_fd, result_fd = int(os.environ.pop("HOROVODLIKE_TASK_FD")), int(os.environ.pop("HOROVODLIKE_RESULT_FD"))
    for descriptor in (task_fd, result_fd):
        os.set_inheritable(descriptor, False)
    task = _read_task(task_fd)
    (length,) = LENGTH.unpack_from(task)
    search_path: list[Any] = json.loads(task[LENGTH.size : LENGTH.size + length])
    sys.path[:] = search_path
    answer, code = _execute(task[LENGTH.size + length :])
    with os.fdopen(result_fd, "wb") as file:
        file.write(answer)
    sys.exit(code)


if __name__ == "__main__":
    main()
