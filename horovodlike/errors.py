"""Every exception that horovodlike raises.

Two kinds of errors matter to a training script. The job is broken: nothing works until the next ``init()``; elastic
training catches these errors. Or one call is wrong: only its tensor failed, and the job continues::

    RuntimeError
     +-- HorovodInternalError                   a collective failed
     |    +-- MismatchError                     the ranks disagree about this tensor; the job continues
     |    +-- UnsupportedReductionError         op=Adasum where it has no meaning; a ValueError as well
     |    +-- IntegrityError                    an object was changed on its way
     |    +-- JobBrokenError                    a peer is lost or stalled
     |    +-- ShutDownError                     a rank has shut the job down
     +-- HostsUpdatedInterrupt                  elastic: the set of hosts has changed
     +-- RendezvousError                        init(): the ranks could not find or trust each other
     +-- StateFileError                         a state on disk is damaged or cannot be trusted
     +-- DamagedRecordsError                    a file of records is damaged, truncated or empty
    ValueError
     +-- NotInitializedError                    used before init()
     +-- ConfigError                            a setting or an environment variable has a bad value
    ImportError
     +-- HorovodVersionMismatchError            built for another version of the framework
"""


class HorovodInternalError(RuntimeError):
    """A collective failed. Elastic training catches this family, restores its state and starts again."""


class MismatchError(HorovodInternalError):
    """The ranks do not agree about one tensor (shape, dtype, operation, root ...).

    Only that tensor failed, on every rank that takes part in it; the job continues.
    """


class UnsupportedReductionError(HorovodInternalError, ValueError):
    """The operation does not support the reduction that was asked for. Nothing was sent; the job continues.

    It is a `HorovodInternalError` as well, because scripts for Horovod catch that class in this case. Elastic training
    does not restart because of it.
    """


class IntegrityError(HorovodInternalError):
    """An object was changed on its way between two ranks, and so was not unpickled: see docs/users/security.md.

    Raised on the ranks that have received a changed object. Others may have received the object as it was sent; they
    learn of the failure when a rank that has raised this error exits or calls ``shutdown()``.
    """


class JobBrokenError(HorovodInternalError):
    """A peer is lost or stalled: nothing works until the next ``init()``."""


class ShutDownError(HorovodInternalError):
    """A rank has shut the job down while this operation was pending."""


class HostsUpdatedInterrupt(RuntimeError):
    """Elastic training: the set of hosts has changed. The state is kept, not restored to the last commit.

    Attributes:
        skip_sync: True if no rank was added, so that no rank needs to receive the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        """Store whether the ranks may skip synchronising the state."""
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle by constructor arguments; the default would pass the message."""
        return type(self), (self.skip_sync,)


class RendezvousError(RuntimeError):
    """``init()`` failed because the ranks could not find, reach, trust or agree with each other."""


class StateFileError(RuntimeError):
    """A state on disk, of elastic training or of a parameter server, cannot be used; the message says why."""


class DamagedRecordsError(RuntimeError):
    """A file of records is damaged, truncated or empty; the message says which file, and which records are lost.

    Attributes:
        file: The path of the file.
        start: The first record that is lost.
        end: The record after the last that is lost; None if all from ``start`` on are, in a number that is not known.
        reason: The cause, as the format's library describes it.
    """

    def __init__(self, file: str, start: int, end: int | None, reason: str) -> None:
        """Build the message from the arguments."""
        if end is None:
            lost = f"the records from {start} on are" if start else "all its records are"
        else:
            lost = f"record {start} is" if end == start + 1 else f"the records {start} to {end - 1} are"
        super().__init__(f"{file} is damaged, and {lost} lost ({reason}): restore the file, or list the others only")
        self.file, self.start, self.end, self.reason = file, start, end, reason

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle by constructor arguments; the default would pass the message."""
        return type(self), (self.file, self.start, self.end, self.reason)


class NotInitializedError(ValueError):
    """A function that needs ``init()`` was called before it, or after ``shutdown()``."""

    def __init__(self, message: str = "horovodlike has not been initialized; use hvd.init().") -> None:
        """Use a message like Horovod's unless another is given."""
        super().__init__(message)


class ConfigError(ValueError):
    """A setting or an environment variable has a value that cannot be used; the message names it and the remedy."""


class HorovodVersionMismatchError(ImportError):
    """A framework is installed in another version than the one horovodlike was built for.

    Attributes:
        name: The framework, for instance ``torch``.
        version: The version of the framework that horovodlike was built for.
        installed_version: The version of the framework that is installed.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        """Build the message from the arguments."""
        super().__init__(
            f"Framework {name} is installed with version {installed_version} but horovodlike was built for version "
            f"{version}. This can result in unexpected behavior including runtime errors. Reinstall horovodlike with "
            "`pip install --no-cache-dir` to build for the new version."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle by constructor arguments; the default would pass the message."""
        return type(self), (self.name, self.version, self.installed_version)
