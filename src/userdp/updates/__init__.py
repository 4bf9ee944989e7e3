"""How one group of records becomes one update: one file per update rule (see `contract`)."""

from userdp.updates.contract import UPDATE_RULES, UpdateRule
from userdp.updates.fedavg import FedAvg
from userdp.updates.filter import Filter
from userdp.updates.mean_gradient import MEAN_GRADIENT, MeanGradient

__all__ = ["MEAN_GRADIENT", "UPDATE_RULES", "FedAvg", "Filter", "MeanGradient", "UpdateRule"]
