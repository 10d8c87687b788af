#!/usr/bin/env python3
"""Compares gateways side by side: one at a time on the same machine, in rounds, in the opposite order every second round.

Everything runs on loopback between h2load and the stand (kruntimes-bench-stand). A gateway is started, warmed up,
taken through all cells and ended, then the next; all that this starts ends with it. An answer other than 2xx ends the
run: there is no figure for a gateway that fails.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import figures
import targets


@dataclass(frozen=True)
class Cell:
    """`calls` of `body` bytes each way, over `connections` with `streams` at once each; `rate` calls a second, or 0:
    as many as can be."""

    name: str
    http: str
    connections: int
    streams: int
    body: int
    calls: int
    rate: int = 0


# Large bodies last: what they leave in memory is not counted for the others.
CELLS = [
    Cell("h1_c1_100b", "h1", 1, 1, 100, 5_000),
    Cell("h1_c16_100b", "h1", 16, 1, 100, 30_000),
    Cell("h1_c64_100b", "h1", 64, 1, 100, 30_000),
    Cell("h2_8x8_100b", "h2", 8, 8, 100, 30_000),
    Cell("open_3200_100b", "h1", 16, 1, 100, 16_000, rate=3_200),
    Cell("h1_c16_64kib", "h1", 16, 1, 64 << 10, 4_000),
    Cell("h1_c16_1mib", "h1", 16, 1, 1 << 20, 480),
]
WARM_UP = Cell("warm_up", "h1", 16, 1, 100, 4_000)
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# === processes ===


class Process:
    """A process whose output goes to a file, and that is ended on the way out."""

    def __init__(self, name: str, command: list, place: Path, env: dict | None = None, stdout=None):
        self.name, self.log = name, place / f"{name}.log"
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                [str(part) for part in command],
                stdout=stdout or log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                preexec_fn=end_with_parent,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.terminate()
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:]

    def wait(self, seconds: int, condition) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start:\n{self.words()}")
            time.sleep(0.05)


def start_stand(program: Path, place: Path, routes: int, churn: int = 0, review_ms: int = 0) -> tuple[Process, dict]:
    command = [program, "serve", f"--dir={place}", f"--routes={routes}", f"--churn={churn}", f"--review-millis={review_ms}"]
    stand = Process("stand", command, place, stdout=subprocess.PIPE)
    if not select.select([stand.child.stdout], [], [], 60)[0]:
        stand.__exit__()
        raise SystemExit(f"the stand says nothing:\n{stand.words()}")
    line = stand.child.stdout.readline()
    if not line:
        stand.__exit__()
        raise SystemExit(f"the stand did not start:\n{stand.words()}")
    return stand, json.loads(line)


def family(pid: int) -> list[int]:
    """`pid` and its descendants."""
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += family(int(child))
    except FileNotFoundError:
        pass
    return found


def cpu_ns(pid: int) -> int:
    """Time that all threads of `pid` and its descendants were on a processor."""
    spent = 0
    for member in family(pid):
        for task in Path(f"/proc/{member}/task").iterdir():
            try:
                spent += int((task / "schedstat").read_text().split()[0])
            except FileNotFoundError:
                pass
    return spent


def forget_peak(pid: int) -> None:
    for member in family(pid):
        Path(f"/proc/{member}/clear_refs").write_text("5")


def peak_kib(pid: int) -> int:
    """The most memory since `forget_peak`; what processes share is counted for each."""
    peak = 0
    for member in family(pid):
        status = Path(f"/proc/{member}/status").read_text()
        peak += int(re.search(r"^VmHWM:\s+(\d+)", status, re.M)[1])
    return peak


def machine() -> tuple[int, int]:
    """Ticks that the machine's processors were busy, and that the host took away."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], ticks[7]


# === load ===


class Load:
    """Calls with h2load, whose log has the time of every call."""

    def __init__(self, place: Path, paths: list[str], token: str):
        self.place, self.paths, self.token = place, paths, token
        self.log = place / "h2load.log"

    def body(self, size: int) -> Path:
        """A JSON document of so many bytes."""
        file = self.place / f"body-{size}.json"
        if not file.exists():
            file.write_bytes(b'{"data":"' + b"x" * (size - 11) + b'"}')
        return file

    def command(self, url: str, cell: Cell) -> list[str]:
        command = ["h2load", "-t", "1", "-n", cell.calls, "-c", cell.connections, "-m", cell.streams]
        command += ["--h1"] if cell.http == "h1" else ["-w", 20, "-W", 24]
        if cell.rate:
            command += ["--rps", cell.rate // cell.connections]
        command += ["--log-file", self.log, "-d", self.body(cell.body)]
        command += ["-H", "content-type: application/json", "-H", f"authorization: Bearer {self.token}"]
        return [str(part) for part in command] + [url + path for path in self.paths]

    def run(self, url: str, cell: Cell, pid: int | None) -> dict:
        self.log.unlink(missing_ok=True)
        if pid:
            forget_peak(pid)
        spent, (busy, steal), began = cpu_ns(pid) if pid else 0, machine(), time.monotonic()
        said = subprocess.run(
            self.command(url, cell), capture_output=True, text=True, timeout=300, preexec_fn=end_with_parent
        ).stdout
        took = time.monotonic() - began
        spent, (busy_end, steal_end) = (cpu_ns(pid) if pid else 0) - spent, machine()
        good = re.search(r"status codes: (\d+) 2xx, 0 3xx, 0 4xx, 0 5xx", said)
        if not good or int(good[1]) != cell.calls or " 0 failed, 0 errored, 0 timeout" not in said:
            raise SystemExit(f"not all {cell.calls} calls of {cell.name} were answered with 2xx:\n{said}")
        times = sorted(int(line.split("\t")[2]) for line in self.log.read_text().splitlines())
        return {
            "requests_per_second": float(re.search(r", ([\d.]+) req/s", said)[1]),
            "p50_us": quantile(times, 0.50),
            "p99_us": quantile(times, 0.99),
            "cpu_us": spent / 1000 / cell.calls,
            "peak_mib": peak_kib(pid) / 1024 if pid else 0,
            "busy": (busy_end - busy) / os.sysconf("SC_CLK_TCK") / took / os.cpu_count(),
            "steal_ticks": steal_end - steal,
            "cipher": (re.search(r"^Cipher: (\S+)", said, re.M) or [None, "none"])[1],
        }


def quantile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


# === the run ===


def chosen(text: str, known: list[str], what: str) -> list[str]:
    """Names in `text`, separated by commas or blanks; all when it is empty."""
    names = text.replace(",", " ").split() or known
    if strange := [name for name in names if name not in known]:
        raise SystemExit(f"{what}: unknown {', '.join(strange)}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def begin(out: Path) -> Path:
    """An empty folder for this run in `out`. From here on a signal ends it as an error would, with all that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("ended by a signal"))
    place = out.resolve() / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def one(target: targets.Target, cells: list[Cell], load: Load, place: Path):
    """Takes one gateway through all cells."""
    if not target.command:
        load.run(target.url, WARM_UP, None)
        for cell in cells:
            yield cell, load.run(target.url, cell, None)
        return
    (place / f"{target.name}.access").unlink(missing_ok=True)
    with Process(target.name, target.command, place, target.env) as process:
        process.wait(120, target.is_ready)
        try:
            load.run(target.url, WARM_UP, process.child.pid)
            for cell in cells:
                yield cell, load.run(target.url, cell, process.child.pid)
        except SystemExit as failure:
            raise SystemExit(f"{target.name}: {failure}\n{process.words()}") from None


def version(command: list[str]) -> str:
    said = subprocess.run(command, capture_output=True, text=True)
    return (said.stdout + said.stderr).strip().splitlines()[0].strip()


def about(settings: argparse.Namespace) -> dict:
    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "routes": settings.routes,
        "rounds": settings.rounds,
        "threads": settings.workers,
        "h2load": version(["h2load", "--version"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of kruntimes-gateway and kruntimes-bench-stand")
    parser.add_argument("--out", type=Path, required=True, help="folder for results; configurations go to a folder in it")
    parser.add_argument("--envoy", default="envoy", help="the program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routes", type=int, default=10_000, help="functions that the Kubernetes API knows")
    parser.add_argument("--workers", type=int, default=1, help="threads of each gateway; the chart gives ours one")
    parser.add_argument("--cells", default="", help=", ".join(cell.name for cell in CELLS))
    parser.add_argument("--targets", default="", help=", ".join(targets.ALL))
    settings = parser.parse_args()
    names = chosen(settings.targets, list(targets.ALL), "targets")
    wanted = chosen(settings.cells, [cell.name for cell in CELLS], "cells")
    cells = [cell for cell in CELLS if cell.name in wanted]
    place = begin(settings.out)
    results = {"about": about(settings), "cells": [asdict(cell) for cell in cells], "records": []}
    stand, where = start_stand(settings.bin / "kruntimes-bench-stand", place, settings.routes)
    with stand:
        load = Load(place, where["paths"], (place / "token").read_text())
        shared = targets.Place(
            settings.bin.resolve(), settings.envoy, place, where, settings.routes, settings.workers
        )
        for turn in range(settings.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                print(f"    round {turn + 1} of {settings.rounds}: {name}", file=sys.stderr, flush=True)
                for cell, measured in one(targets.ALL[name](shared), cells, load, place):
                    results["records"].append({"target": name, "cell": cell.name, "round": turn, **measured})
    (settings.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = figures.table(results)
    (settings.out / "results.md").write_text(table)
    (settings.out / "results.svg").write_text(figures.plot(results))
    print(table)
    print(figures.result_line(results))


if __name__ == "__main__":
    main()
