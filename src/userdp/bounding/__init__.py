"""Contribution bounding for records with several owners: from the edges alone, never the text."""
