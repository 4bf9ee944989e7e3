"""Names that a configuration shares with the code behind it. Needs no torch."""
