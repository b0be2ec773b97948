"""The process that watches over a job until its last rank has exited."""
