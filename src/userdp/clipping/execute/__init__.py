"""How a model is run: `execution` joins layer swapping, checkpointing and compilation."""
