"""The package ``horovod.common`` as a script sees it."""
