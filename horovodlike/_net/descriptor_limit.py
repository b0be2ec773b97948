"""How many files this process may have open at once."""

import os
import resource

from horovodlike.errors import RendezvousError

_OTHERS = 256
"""What else may be opened: strangers' connections, and what the script does."""


def ensure_descriptors(count: int, purpose: str) -> None:
    """Raises the soft limit of open files to the hard one, if it leaves no room for this many more.

    Args:
        count: How many will be opened.
        purpose: What they are, for the error.

    Raises:
        RendezvousError: The hard limit is too low, too.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            f"this process may have {hard} open files, but {purpose} need {needed}: raise the limit (ulimit -Hn; "
            "nofile in /etc/security/limits.conf; LimitNOFILE of the service that starts the ranks), or start fewer "
            "ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
