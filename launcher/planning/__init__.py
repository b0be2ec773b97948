"""From what a user asks for to one plan for each rank, before anything starts."""
