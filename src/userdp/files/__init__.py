"""Files that are there whole or not at all: written, chained, locked, and read back."""
