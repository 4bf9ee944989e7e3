"""The CUDA path against the CPU path: same sum, fresh noise of the stated size, same ledger."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

from userdp.index import UserIndex
from userdp.noise.draw import add_gaussian_
from userdp.noise.secret import RunSecret
from userdp.plan import Plan
from userdp.step import PrivateStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _noise(step: int, size: int = 1_000_000) -> torch.Tensor:
    noise = torch.zeros(size, device="cuda")
    add_gaussian_(noise, noise_stddev=2.0, secret=RunSecret.fixed_for_tests(7), step=step)
    return noise.cpu()


def test_cuda_noise_is_gaussian_of_the_stated_size() -> None:
    # Fixed seed 7; a correct generator fails this p < 0.001 for one seed in a thousand.
    sample = _noise(0).numpy() / 2.0
    assert kstest(sample[:100_000], "norm").pvalue > 0.001
    assert abs(sample.std() - 1) < 0.005


def test_cuda_noise_repeats_for_a_step_and_differs_between_steps() -> None:
    assert torch.equal(_noise(3), _noise(3))
    correlation = np.corrcoef(_noise(3).numpy(), _noise(4).numpy())[0, 1]
    # Standard error 0.001 at a million draws: 4 of them, failure probability 6e-5.
    assert abs(correlation) < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_noise_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    owners = [user for user in range(12) for _ in range(3)]
    torch.manual_seed(0)
    inputs = torch.randn(len(owners), 8)
    weights: dict[str, torch.Tensor] = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device, dtype)
        plan = Plan.sample_users(
            num_users=12,
            expected_cohort_size=6,
            group_size=2,
            steps=5,
            clip_norm=0.1,
            noise_multiplier=0.0,
            delta=1e-2,
            non_private=True,
        )
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            plan,
            UserIndex.from_owners(owners),
            record_loss=lambda model, batch: model(batch["x"])[:, 0].float() ** 2,
            secret=RunSecret.fixed_for_tests(1),
        )
        for cohort in step.cohorts():
            step.apply({"x": inputs[rows].to(device, dtype)} for rows in cohort)
        weights[device] = torch.cat(
            [p.detach().float().flatten().cpu() for p in model.parameters()]
        )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(weights["cpu"], weights["cuda"], atol=tolerance)
