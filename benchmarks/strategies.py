"""How long it takes to find a strategy, and how good it is: beside JAX Privacy if it is there.

Run: python benchmarks/strategies.py [--sizes 500:16 2000:64] [--buffers 4] [--jax PYTHON]

Each line is one problem: prefix sums of n steps with b bands, general and Toeplitz, and with
`--buffers` that many buffers for a user who comes once. The mean error is ||A C^-1||_F^2 / n for
columns of norm 1. `--jax` names a Python that has `jax_privacy`, in an environment of its own; its
optimiser takes its own default number of iterations. Bars: n = 2,000, b = 64 in under 30 s on two
cores; an error of at most 1.001 times that of JAX Privacy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

import numpy as np

from userdp.noise.strategies.buffers import buffered_error, optimised_buffers
from userdp.noise.strategies.optimise import mean_error, optimised, optimised_toeplitz
from userdp.noise.strategies.workload import Workload

# Runs in the other environment: times include compiling, as its users' do.
JAX = """
import json, sys, time
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, toeplitz
n, b, m = map(int, sys.argv[1:])
began = time.perf_counter()
general = float(banded.per_query_error(banded.optimize(n, bands=b)).mean())
middle = time.perf_counter()
row = toeplitz.optimize_banded_toeplitz(n, b)
errors = toeplitz.per_query_error(strategy_coef=row, n=n)
constant = float(jnp.mean(errors) * jnp.sum(row**2))
later = time.perf_counter()
found = {"general": [general, middle - began], "toeplitz": [constant, later - middle]}
if m:
    blt = buffered_toeplitz.optimize(
        n=n, min_sep=n, max_participations=1, error="mean", min_buffers=m, max_buffers=m
    )
    loss = buffered_toeplitz.LossFn.build_min_sep(n=n, error="mean", min_sep=n)
    found["buffered"] = [float(loss.loss(blt)), time.perf_counter() - later]
print(json.dumps(found))
"""


def timed(make, error):
    began = time.perf_counter()
    found = make()
    return error(found), time.perf_counter() - began


def ours(n: int, b: int, buffers: int) -> dict[str, tuple[float, float]]:
    workload = Workload(steps=n)

    def of_buffers(found):
        error = buffered_error(workload, np.array(found.decays), np.array(found.scales))
        return error / found.diagonal**2

    found = {
        "toeplitz": timed(
            lambda: optimised_toeplitz(workload, b), lambda c: mean_error(workload, c)
        ),
        "general": timed(lambda: optimised(workload, b), lambda c: mean_error(workload, c)),
    }
    if buffers:
        found["buffered"] = timed(lambda: optimised_buffers(workload, buffers, n), of_buffers)
    return found


def theirs(python: str | None, n: int, b: int, buffers: int) -> dict[str, tuple[float, float]]:
    if python is None:
        return {}
    command = [python, "-c", JAX, str(n), str(b), str(buffers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["500:16", "2000:64"], metavar="N:B")
    parser.add_argument("--buffers", type=int, default=0, metavar="M")
    parser.add_argument("--jax", metavar="PYTHON", help="a Python that has jax_privacy")
    arguments = parser.parse_args()
    # Loops are compiled once and kept: that is not part of any problem.
    ours(8, 2, 1)
    print(f"{'steps':>6}{'bands':>6}  {'strategy':<10}{'error':>11}{'seconds':>9}", end="")
    print(f"{'JAX Privacy':>14}{'seconds':>9}{'ratio':>10}")
    for size in arguments.sizes:
        n, b = map(int, size.split(":"))
        found = ours(n, b, arguments.buffers)
        other = theirs(arguments.jax, n, b, arguments.buffers)
        for name, (error, seconds) in found.items():
            print(f"{n:>6}{b:>6}  {name:<10}{error:>11.5f}{seconds:>9.2f}", end="")
            if name in other:
                error_there, seconds_there = other[name]
                print(f"{error_there:>14.5f}{seconds_there:>9.1f}{error / error_there:>10.6f}")
            else:
                print()


if __name__ == "__main__":
    main()
