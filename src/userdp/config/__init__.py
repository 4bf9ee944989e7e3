"""A training run as a TOML file: its keys, what they mean together, and what is wrong with them."""
