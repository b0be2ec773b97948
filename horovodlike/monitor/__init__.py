"""The monitor of a job."""
