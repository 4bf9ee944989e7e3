"""Noise: what is added (`gaussian`), where randomness comes from (`secret`), its draw (`draw`)."""
