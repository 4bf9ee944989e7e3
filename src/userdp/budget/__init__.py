"""One budget for all that is released about the same people: its file, its rows and their sum."""
