"""Which settings fine-tune well under user-level privacy: the evidence behind the defaults."""
