"""Which group size, cohort, sampler and noise, for a compute budget; none of it is a promise."""
