"""Who takes part in a step: one file per sampler (`contract` says what a sampler is)."""

from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler
from userdp.sampling.poisson_records import PoissonRecords
from userdp.sampling.poisson_users import PoissonUsers

__all__ = ["SAMPLERS", "Cohort", "PoissonRecords", "PoissonUsers", "PublicNumbers", "Sampler"]
