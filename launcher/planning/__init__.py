"""The way from a request to one plan for each rank, before anything starts."""
