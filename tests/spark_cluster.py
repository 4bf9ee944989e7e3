"""A standalone Spark cluster on this machine: a master and two workers, each a process of its own.

It needs PySpark and Java. Programs run on it if their environment has `Cluster.environment`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HOST = "127.0.0.1"
PATIENCE = 60.0
NUM_WORKERS = 2


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    if find_spec("pyspark") is None:
        return "the extra [spark] is not installed"
    return "" if shutil.which("java") else "there is no Java"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster."""

    url: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs in its environment to run on the cluster."""
        options = ["--conf spark.executor.memory=600m", "--conf spark.executor.cores=1"]
        options += ["--conf spark.sql.shuffle.partitions=8", f"--conf spark.driver.host={HOST}"]
        arguments = " ".join([f"--master {self.url}", "--driver-memory 1g", *options])
        return os.environ | {
            "PYSPARK_SUBMIT_ARGS": f"{arguments} pyspark-shell",
            "SPARK_LOCAL_IP": HOST,
        }

    def applications(self) -> list[set[str]]:
        """The applications that each worker ran a part of."""
        return [
            {path.name for path in (self.folder / name).glob("app-*")} for name in _worker_names()
        ]


def _worker_names() -> list[str]:
    return [f"worker_{number}" for number in range(NUM_WORKERS)]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """A cluster whose logs and scratch files are in `folder`; ended with the `with` block."""
    with contextlib.ExitStack() as stack:
        log = folder / "master.log"
        master = ["master.Master", "--host", HOST, "--port", "0", "--webui-port", "0"]
        stack.enter_context(_process(master, log))
        url = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        for name in _worker_names():
            own = folder / name
            own.mkdir()
            worker = ["worker.Worker", "--host", HOST, "--webui-port", "0", "--cores", "1"]
            worker += ["--memory", "700m", "--work-dir", str(own), url]
            stack.enter_context(_process(worker, folder / f"{name}.log"))
            _wait_for(folder / f"{name}.log", r"(Successfully registered) with master")
        yield Cluster(url=url, folder=folder)


@contextlib.contextmanager
def _process(arguments: list[str], log: Path) -> Iterator[None]:
    import pyspark  # pyright: ignore[reportMissingImports]

    home = Path(str(pyspark.__file__)).parent
    name, *rest = arguments
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *rest],
            stdout=output,
            stderr=output,
            env=environment,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _wait_for(log: Path, pattern: str) -> str:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.2)
    raise TimeoutError(f"no {pattern!r} in {log}: {log.read_text(errors='replace')[-2000:]}")
