"""The process on each host that starts and ends its ranks. It needs the standard library only."""
