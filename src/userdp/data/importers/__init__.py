"""Importers, one file for each kind of source. All of them count what they skip."""
