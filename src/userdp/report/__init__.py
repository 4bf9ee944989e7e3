"""The report of a run: statement, model card, HTML page and pictures."""
