"""Other programs that start the ranks of a job in place of hvdrun's own agents."""
