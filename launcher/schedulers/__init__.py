"""Other programs that allocate hosts, or start agents or ranks on them."""
