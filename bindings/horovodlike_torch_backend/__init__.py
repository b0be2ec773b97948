"""The entry point through which PyTorch finds the backend `hvd`, when torch is imported or the name is first used.

`import torch` runs this module, so it imports nothing from horovodlike, and never raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "hvd"


def register() -> None:
    """Register the backend. PyTorch calls this as an entry point; a second call changes nothing."""
    try:
        from torch.distributed import Backend

        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # an error would make `import torch` fail, also for programs that do not use the backend
        logging.getLogger(__name__).debug("the backend %s could not be registered", NAME, exc_info=True)


def _create(options: Any, backend_options: object) -> dist.ProcessGroup:
    """Make a process group; horovodlike is imported only now."""
    from horovodlike.torch.distributed.backend import create

    return create(options, backend_options)
