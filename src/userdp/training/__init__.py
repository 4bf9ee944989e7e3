"""The private loop over a store, with what it takes and what it tells."""
