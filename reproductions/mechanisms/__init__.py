"""Which sampler and noise leave the least error, over epsilon and how often users come back."""
