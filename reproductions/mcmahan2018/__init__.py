"""McMahan et al. 2018: sampling and estimators, clipping, noise, and FedAvg against FedSGD."""
