"""How one group of records becomes one update: one file per update rule (see `contract`)."""
