"""What is added to the clipped sum: one file per noise (`contract` says what a noise is)."""

from userdp.noise.banded import Banded
from userdp.noise.contract import NOISES, Noise
from userdp.noise.discrete import Discrete
from userdp.noise.gaussian import Gaussian

__all__ = ["NOISES", "Banded", "Discrete", "Gaussian", "Noise"]
