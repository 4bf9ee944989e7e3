"""The private step in a training loop of your own: your model, optimizer and data.

Run: python examples/own_loop.py
On two processes: torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import torch

from userdp import Plan, PrivateStep, UserIndex


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    num_users, records_per_user = 500, 6
    owners = [user for user in range(num_users) for _ in range(records_per_user)]
    inputs = torch.randn(len(owners), 10)
    targets = inputs @ torch.arange(10.0) + 0.1 * torch.randn(len(owners))

    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    plan = Plan.sample_users(
        num_users=num_users,
        expected_cohort_size=50,
        group_size=4,
        steps=steps,
        clip_norm=1.0,
        epsilon=4.0,
        delta=1e-4,
    )
    step = PrivateStep(
        model,
        optimizer,
        plan,
        UserIndex.from_owners(owners),
        record_loss=lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]) ** 2,
    )
    # A made-up example. On one process it may be left out (docs/distributed.md).
    step.check_model({"x": torch.randn(2, 10), "y": torch.randn(2)})
    for cohort in step.cohorts():
        step.apply({"x": inputs[rows], "y": targets[rows]} for rows in cohort)

    fresh = torch.randn(1000, 10)
    error = (model(fresh)[:, 0] - fresh @ torch.arange(10.0)).square().mean().item()
    print(f"mean squared error on fresh data {error:.3f}")
    print(step.statement())


if __name__ == "__main__":
    main()
