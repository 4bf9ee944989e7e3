"""Noise: what is added (`gaussian`), where its randomness comes from (`secret`), how it is drawn (`draw`)."""
