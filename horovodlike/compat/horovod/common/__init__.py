"""What a script sees as ``horovod.common``."""
