"""A run on disk: how it is opened, recorded, saved, gone on with, ended, checked and exported."""
