"""How fast is accounting: our search beside dp_accounting's own, CPU seconds in one process.

Run: python benchmarks/accounting.py [--calibrations N] [--allocations N] [--library-seconds S]

1. Random calibrations over the whole range the search promises: K to 256, T to 10,000, epsilon
   0.1 to 64, delta to 1e-12. Bar: under 1 s CPU each.
2. A planning sweep: noise of user-level sampling for 17 cohort sizes, and of example-level sampling
   for 9 group sizes. Bar: under 5 s CPU.
3. Random allocation: sigma 0.3 to 10, up to 1,000 participations, one of up to 100,000 steps each,
   delta to 1e-12; the bar's setting first. Bar: under 1 s CPU each.
4. The same sweep through `dp_accounting` alone, as its users call it (default interval, its own
   calibration). Each calibration gets a time limit; one that hits it counts with the limit, so the
   ratio is a lower bound. Bar: at least 30 times slower.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant

from userdp.accounting import accountant, events
from userdp.units import Adjacency

USERS, STEPS, EPSILON, DELTA, COMPUTE = 342_477, 2000, 4.0, 1e-9, 4096
COHORTS = [1 << power for power in range(17)]
GROUPS = [1 << power for power in range(9)]


def run_event(group_size: int, rate: float, steps: int):
    return lambda sigma: events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=rate, group_size=group_size, noise_multiplier=sigma
        ),
        steps,
    )


def sweep() -> list[tuple[str, object]]:
    return [(f"ULS M={m}", run_event(1, m / USERS, STEPS)) for m in COHORTS] + [
        (f"ELS G={g}", run_event(g, COMPUTE / (g * USERS), STEPS)) for g in GROUPS
    ]


def search(event_of, epsilon: float, delta: float) -> float:
    found = accountant.search_noise(
        event_of, target=epsilon, delta=delta, adjacency=Adjacency.ADD_REMOVE
    )
    assert found is not None
    return found


def library(event_of, epsilon: float, delta: float, limit: int) -> float | None:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return dp_accounting.calibrate_dp_mechanism(PLDAccountant, event_of, epsilon, delta)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def random_calibrations(count: int) -> None:
    rng = np.random.default_rng(0)
    seconds: list[float] = []
    for _ in range(count):
        group, steps = int(2 ** rng.uniform(0, 8.001)), int(10 ** rng.uniform(0, 4))
        rate, epsilon = 10 ** rng.uniform(-5, 0), 10 ** rng.uniform(-1, np.log10(64))
        delta = 10 ** rng.uniform(-12, -4)
        start = time.process_time()
        search(run_event(group, rate, steps), epsilon, delta)
        seconds.append(time.process_time() - start)
    quantiles = np.quantile(seconds, [0.5, 0.9, 0.99, 1.0])
    print(f"{count} random calibrations, CPU s: median {quantiles[0]:.3f}, 90% {quantiles[1]:.3f}, "
          f"99% {quantiles[2]:.3f}, max {quantiles[3]:.3f}")  # fmt: skip


def random_allocations(count: int) -> None:
    rng = np.random.default_rng(0)
    settings = [(1.0, 100, 10, 1e-6)]
    for _ in range(count):
        k = int(10 ** rng.uniform(0, 3))
        steps = k * int(10 ** rng.uniform(0.3, 5)) + int(rng.integers(0, k))
        noise, delta = 10 ** rng.uniform(np.log10(0.3), 1), 10 ** rng.uniform(-12, -4)
        settings.append((noise, steps, k, delta))
    # The first call compiles, or reads what was compiled before.
    allocated(1.0, 10, 2, 1e-3)
    seconds: list[float] = []
    for noise, steps, k, delta in settings:
        start = time.process_time()
        found = allocated(noise, steps, k, delta)
        seconds.append(time.process_time() - start)
        if len(seconds) == 1:
            print(f"allocation, sigma 1, 10 of 100 steps, delta 1e-6: {found:.4f}, "
                  f"{seconds[0]:.3f} s CPU")  # fmt: skip
    quantiles = np.quantile(seconds, [0.5, 0.9, 1.0])
    print(f"{count} random allocations, CPU s: median {quantiles[0]:.3f}, 90% {quantiles[1]:.3f}, "
          f"max {quantiles[2]:.3f}")  # fmt: skip


def allocated(noise: float, steps: int, participations: int, delta: float) -> float:
    event = events.random_allocation_gaussian(
        steps=steps, participations=participations, noise_multiplier=noise
    )
    return accountant.epsilon(event, delta=delta, adjacency=Adjacency.ADD_REMOVE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibrations", type=int, default=300)
    parser.add_argument("--allocations", type=int, default=40)
    parser.add_argument("--library-seconds", type=int, default=20, help="limit per calibration")
    options = parser.parse_args()
    random_calibrations(options.calibrations)
    random_allocations(options.allocations)

    start = time.process_time()
    ours = {name: search(event_of, EPSILON, DELTA) for name, event_of in sweep()}
    our_seconds = time.process_time() - start
    print(f"sweep of {len(ours)} calibrations, our search: {our_seconds:.2f} s CPU")
    if not options.library_seconds:
        return

    start, stopped = time.process_time(), 0
    for name, event_of in sweep():
        begin = time.process_time()
        theirs = library(event_of, EPSILON, DELTA, options.library_seconds)
        stopped += theirs is None
        told = "stopped" if theirs is None else f"{theirs:.5f}"
        print(f"  {name:12} ours {ours[name]:.5f}  library {told}  "
              f"{time.process_time() - begin:.1f} s", flush=True)  # fmt: skip
    their_seconds = time.process_time() - start
    print(
        f"the same through dp_accounting alone: {their_seconds:.1f} s CPU, {stopped} stopped at "
        f"{options.library_seconds} s: at least {their_seconds / our_seconds:.0f} times ours"
    )


if __name__ == "__main__":
    main()
