#!/usr/bin/env python3
"""Calls one gateway process back to back while routes come and go, and looks whether anything of it grows.

Rounds of calls, over HTTP/1.1 and HTTP/2 in turns and each over new connections; after every round all of them are
closed and the process is looked at. What it has after the first tenth is compared with what it has at the end.
"""

import argparse
import json
import re
import sys
import time
import urllib.request
from pathlib import Path

import run
import targets

ROUND = 50_000
CELLS = [
    run.Cell("h1", "h1", 64, 1, 100, ROUND),
    run.Cell("h2", "h2", 8, 8, 100, ROUND),
    run.Cell("h1_64kib", "h1", 16, 1, 64 << 10, ROUND // 25),
    run.Cell("h2_many", "h2", 200, 2, 100, ROUND),
]
# Memory that a process of this size takes or gives back without leaking.
SLACK_MIB = 4
METRICS = {
    "connections": "kruntimes_gateway_connections",
    "in_flight": "kruntimes_gateway_calls_in_flight",
    "routes": "kruntimes_gateway_routes",
    "owners": "kruntimes_gateway_owners",
    "tasks": "kruntimes_tasks",
    "fds": "process_open_fds",
}


def look(admin: str, pid: int) -> dict:
    """What the gateway has, once the connections of the last round are gone."""
    deadline = time.monotonic() + 30
    while True:
        page = urllib.request.urlopen(f"{admin}/metrics", timeout=5).read().decode()
        seen = {key: int(re.search(rf"^{name} (\d+)", page, re.M)[1]) for key, name in METRICS.items()}
        if seen["connections"] == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    status = Path(f"/proc/{pid}/status").read_text()
    seen["rss_mib"] = round(int(re.search(r"^VmRSS:\s+(\d+)", status, re.M)[1]) / 1024, 2)
    return seen


def slope(samples: list[dict]) -> float:
    """Bytes that memory grows by with each call: least squares."""
    xs, ys = [it["calls"] for it in samples], [it["rss_mib"] * (1 << 20) for it in samples]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / spread if spread else 0.0


def faults(first: dict, last: dict, most_routes: int) -> list[str]:
    found = [f"{last[key]} {key} at rest" for key in ("connections", "in_flight") if last[key]]
    # A scrape has a connection and a task of its own, and a watch may just be made anew.
    found += [f"{key} {first[key]} -> {last[key]}" for key in ("fds", "tasks", "owners") if last[key] > first[key] + 4]
    if last["routes"] > most_routes:
        found.append(f"{last['routes']} routes, of {most_routes} at most")
    if last["rss_mib"] > first["rss_mib"] + SLACK_MIB:
        found.append(f"memory {first['rss_mib']} -> {last['rss_mib']} MiB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of kruntimes-gateway and kruntimes-bench-stand")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=5_000_000)
    parser.add_argument("--routes", type=int, default=10_000)
    parser.add_argument("--churn", type=int, default=100, help="functions that come and go each second")
    settings = parser.parse_args()
    place = run.begin(settings.out)

    samples, began = [], time.monotonic()
    program = settings.bin / "kruntimes-bench-stand"
    stand, where = run.start_stand(program, place, settings.routes, settings.churn)
    with stand:
        load = run.Load(place, where["paths"], (place / "token").read_text())
        shared = targets.Place(settings.bin.resolve(), "", place, where, settings.routes, 1)
        target = targets.kruntimes(shared)
        admin = target.ready.removesuffix("/readyz")
        with run.Process(target.name, target.command, place, target.env) as process:
            process.wait(120, target.is_ready)
            made, turn = 0, 0
            while made < settings.calls:
                cell = CELLS[turn % len(CELLS)]
                load.run(target.url, cell, process.child.pid)
                # Its lines are not what is looked at, and are many.
                process.log.write_bytes(b"")
                made, turn = made + cell.calls, turn + 1
                samples.append({"calls": made, **look(admin, process.child.pid)})
                if turn % 10 == 0:
                    print(f"    {samples[-1]}", file=sys.stderr, flush=True)
    # Every kind of round has been there before what is compared.
    start = max(len(CELLS), len(samples) // 10)
    first = {key: max(it[key] for it in samples[len(CELLS) // 2 : start + 1]) for key in samples[0]}
    last = samples[-1]
    (settings.out / "soak.json").write_text(json.dumps(samples, indent=1) + "\n")
    wrong = faults(first, last, settings.routes + 101)
    print(
        f"RESULT calls={last['calls']} minutes={(time.monotonic() - began) / 60:.1f} rss_first_mib={first['rss_mib']} "
        f"rss_last_mib={last['rss_mib']} growth_bytes_per_call={slope(samples[start:]):.3f} "
        f"fds_first={first['fds']} fds_last={last['fds']} tasks_first={first['tasks']} tasks_last={last['tasks']} "
        f"connections={last['connections']} routes={last['routes']} faults={len(wrong)}"
    )
    if wrong:
        raise SystemExit("it grows: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
