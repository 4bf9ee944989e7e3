"""What one group of records gives: one file per update rule (`contract` says what one is)."""
