"""The job's key, from the environment or from a file that the user names."""

import os
import stat
from collections.abc import MutableMapping

from horovodlike._bootstrap.environment import SECRET_KEY, SECRET_KEY_FILE
from horovodlike._net.secure_channel import KEY_BYTES, JobKey
from horovodlike.errors import ConfigError

_kept_key: JobKey | None = None


def take_key(environ: MutableMapping[str, str]) -> JobKey | None:
    """Return the key that all ranks of the job were given, or None if they were not given one.

    A key in the environment is removed from there, so that child processes do not inherit it, and kept for the next
    call.

    Raises:
        ConfigError: The key is malformed, or other users can read its file.
    """
    global _kept_key
    text = environ.pop(SECRET_KEY, "").strip()
    if text:
        _kept_key = _parse(text, SECRET_KEY)
    if _kept_key is not None:
        return _kept_key
    path = environ.get(SECRET_KEY_FILE, "").strip()
    return read_key_file(path, SECRET_KEY_FILE) if path else None


def monitor_key(key: JobKey) -> JobKey:
    """Derive the key of the reports to the job's monitor from a key that all ranks of the job have."""
    return key.derive(b"horovodlike monitor")


def read_key_file(path: str, source: str) -> JobKey:
    """Read a key that the user keeps in a file.

    Args:
        path: The file: 64 hexadecimal digits, readable by no other user.
        source: The variable or option that names the file, for errors.

    Raises:
        ConfigError: The file cannot be read, other users can read it, or it holds no key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{source}: {path} is not a file")
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{source}: {path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}, "
                    f"but a key must be user {os.geteuid()}'s alone: chmod 600"
                )
            content = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"{source}: {path} cannot be read: {error.strerror}") from error
    return _parse(content.decode(errors="replace").strip(), f"{source}: {path}")


def _parse(text: str, source: str) -> JobKey:
    try:
        return JobKey(bytes.fromhex(text))
    except ValueError:
        raise ConfigError(f"{source} must be 64 hexadecimal digits (its value is not shown here)") from None
