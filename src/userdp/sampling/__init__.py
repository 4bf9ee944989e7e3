"""Who takes part in a step: one file per sampler (`contract` says what a sampler is)."""

from userdp.sampling.allocation import Allocation
from userdp.sampling.balanced_iteration import BalancedIteration
from userdp.sampling.balls_in_bins import BallsInBins
from userdp.sampling.capped_poisson import CappedPoissonUsers
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler
from userdp.sampling.cyclic_poisson import CyclicPoissonRecords, CyclicPoissonUsers
from userdp.sampling.min_separated import MinSeparated
from userdp.sampling.poisson_records import PoissonRecords
from userdp.sampling.poisson_users import PoissonUsers
from userdp.sampling.shuffled import Shuffled, ShuffledRecords
from userdp.sampling.without_replacement import WithoutReplacement

__all__ = [
    "SAMPLERS",
    "Allocation",
    "BalancedIteration",
    "BallsInBins",
    "CappedPoissonUsers",
    "Cohort",
    "CyclicPoissonRecords",
    "CyclicPoissonUsers",
    "MinSeparated",
    "PoissonRecords",
    "PoissonUsers",
    "PublicNumbers",
    "Sampler",
    "Shuffled",
    "ShuffledRecords",
    "WithoutReplacement",
]
