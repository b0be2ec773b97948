"""The entry point through which PyTorch finds the backend `hvd`, when torch is imported or the name is first used.

`import torch` runs this module, so it imports nothing from horovodlike, and never raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist


def register() -> None:
    """Register the backend, if it is not registered yet. PyTorch calls this as an entry point."""
    try:
        from torch.distributed import Backend

        if "hvd" not in Backend.backend_list:
            Backend.register_backend("hvd", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # an error would make `import torch` fail, also for programs that do not use the backend
        logging.getLogger(__name__).debug("the backend hvd could not be registered", exc_info=True)


def _create(options: Any, backend_options: object) -> dist.ProcessGroup:
    """Make a process group; horovodlike is imported only now."""
    from horovodlike.torch.distributed.backend import create

    return create(options, backend_options)
