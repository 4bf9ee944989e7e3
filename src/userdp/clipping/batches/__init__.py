"""Users into batches: `cohort` chooses among `equal`, `ragged` and `joined_records`."""
