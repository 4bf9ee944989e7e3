"""Sources of records, one file each: every importer yields `Record`s and counts what it skips."""
