"""``Hvdrun``: has SageMaker's ``ModelTrainer`` start training jobs with ``hvdrun``.

::

    ModelTrainer(..., source_code=SourceCode(source_dir="src", entry_script="train.py"), distributed=Hvdrun())

Every job of one ``Hvdrun`` has its key: make one for each job.
"""

import secrets
from pathlib import Path

from pydantic import Field
from sagemaker.train.distributed import DistributedConfig

__all__ = ["Hvdrun"]


class Hvdrun(DistributedConfig):
    """Starts ``hvdrun`` on each host of a training job, where it finds the other hosts by itself.

    Attributes:
        process_count_per_node: The number of ranks of each host; None for one for each GPU, or one without GPUs.
        options: More options of ``hvdrun``, such as ``["--verbose"]``.
        secret_key: The key that the hosts hold, 64 hexadecimal digits. It travels in the channel that brings the driver
            and the training code to the hosts, and is as safe as that code. The SDK does not log it.
    """

    process_count_per_node: int | None = None
    options: list[str] = Field(default_factory=list)
    secret_key: str = Field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def driver_dir(self) -> str:
        """The folder that is copied to the hosts."""
        return str(Path(__file__).with_name("drivers"))

    @property
    def driver_script(self) -> str:
        """The program in that folder that runs on each host."""
        return "hvdrun_driver.py"
