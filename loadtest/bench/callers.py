#!/usr/bin/env python3
"""What many callers cost one gateway, and what a storm of new ones does to those it knows.

First 1, 100 and 10,000 callers, each with a token of its own, in rounds that take turns: processor time of a caller's first
call, which needs an access review, and of a call afterwards; and memory. Then a known caller calls at a steady pace,
once alone and once while callers that nobody knows come as fast as they can: reviews take REVIEW_MS each, as at
a busy API server.
"""

import argparse
import json
import re
import socket
import ssl
import statistics
import sys
import threading
import urllib.request
from pathlib import Path

import run
import targets

CALLERS = [1, 100, 10_000]
# Within the time that a decision is kept.
CALLS = 20_000
CONNECTIONS = 16
STORM_CONNECTIONS = 64
REVIEW_MS = 5
# Of the known caller: 800 calls a second for 8 s.
PACE = run.Cell("pace", "h1", 16, 1, 100, 6_400, rate=800)


class Caller:
    """Connections over which anybody calls, each sending again when all have been answered."""

    def __init__(self, url: str, paths: list[str], token: str, connections: int):
        host, port = url.split("//")[1].split(":")
        trust = ssl.create_default_context()
        # The name in the certificate is another one; h2load does not look either.
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        self.lines = []
        for _ in range(connections):
            plain = socket.create_connection((host, int(port)))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.lines.append(trust.wrap_socket(plain))
        self.paths, self.signed = paths, token.rpartition(".")[0]
        self.statuses: dict[int, int] = {}

    def call(self, numbers: list[int]) -> None:
        """One call each by the callers with these numbers, as many as there are connections."""
        body = b'{"data":"' + b"x" * 89 + b'"}'
        used = list(zip(self.lines, numbers))
        for line, number in used:
            head = (
                f"POST {self.paths[number % len(self.paths)]} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
                f"authorization: Bearer {self.signed}.{number:0342d}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            line.sendall(head.encode() + body)
        for line, _ in used:
            answer = line.recv(65536)
            while True:
                head, end, rest = answer.partition(b"\r\n\r\n")
                if end and len(rest) >= int(re.search(rb"content-length: (\d+)", head, re.I)[1]):
                    break
                more = line.recv(65536)
                if not more:
                    raise SystemExit("the gateway hung up")
                answer += more
            status = int(head[9:12])
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def close(self) -> None:
        for line in self.lines:
            line.close()


def waves(numbers, size: int):
    wave = []
    for number in numbers:
        wave.append(number)
        if len(wave) == size:
            yield wave
            wave = []
    if wave:
        yield wave


def rss_mib(pid: int) -> float:
    return int(re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1]) / 1024


def growth(start, load: run.Load, count: int) -> dict:
    """One gateway and so many callers."""
    target, process = start()
    with process:
        process.wait(120, target.is_ready)
        load.run(target.url, run.WARM_UP, process.child.pid)
        caller = Caller(target.url, load.paths, load.token, CONNECTIONS)
        spent = run.cpu_ns(process.child.pid)
        for wave in waves(range(count), CONNECTIONS):
            caller.call(wave)
        first = run.cpu_ns(process.child.pid) - spent
        spent = run.cpu_ns(process.child.pid)
        for wave in waves((number % count for number in range(CALLS)), CONNECTIONS):
            caller.call(wave)
        after = run.cpu_ns(process.child.pid) - spent
        caller.close()
        if set(caller.statuses) != {200}:
            raise SystemExit(f"{count} callers: answers {caller.statuses}\n{process.words()}")
        return {
            "first_us": first / 1000 / count,
            "cpu_us": after / 1000 / CALLS,
            "rss_mib": rss_mib(process.child.pid),
        }


def storm(start, load: run.Load, reviews) -> dict:
    """The known caller's p99, alone and in the storm; what the storm was told, and what reached the API server."""
    target, process = start()
    with process:
        process.wait(120, target.is_ready)
        load.run(target.url, run.WARM_UP, process.child.pid)
        calm = load.run(target.url, PACE, process.child.pid)
        reviews()
        caller, over, next_number = Caller(target.url, load.paths, load.token, STORM_CONNECTIONS), threading.Event(), [1]

        def blow() -> None:
            while not over.is_set():
                caller.call(list(range(next_number[0], next_number[0] + STORM_CONNECTIONS)))
                next_number[0] += STORM_CONNECTIONS

        wind = threading.Thread(target=blow)
        wind.start()
        try:
            stormy = load.run(target.url, PACE, process.child.pid)
        finally:
            over.set()
            wind.join()
            caller.close()
        return {"calm": calm["p99_us"], "storm": stormy["p99_us"], "told": caller.statuses, **reviews()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="folder of kruntimes-gateway and kruntimes-bench-stand")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    place = run.begin(settings.out)
    program = settings.bin / "kruntimes-bench-stand"

    def stand_of(review_ms: int):
        stand, where = run.start_stand(program, place, 10_000, review_ms=review_ms)
        load = run.Load(place, where["paths"], (place / "token").read_text())
        shared = targets.Place(settings.bin.resolve(), "", place, where, 10_000, 1)

        def start():
            target = targets.kruntimes(shared)
            return target, run.Process(target.name, target.command, place, target.env)

        def reviews() -> dict:
            return json.load(urllib.request.urlopen(f"http://{where['kubernetes']}/reviews", timeout=5))

        return stand, load, start, reviews

    measured: dict[int, list[dict]] = {count: [] for count in CALLERS}
    stand, load, start, reviews = stand_of(0)
    with stand:
        for turn in range(settings.rounds):
            for count in CALLERS if turn % 2 == 0 else reversed(CALLERS):
                seen = growth(start, load, count)
                print(f"    round {turn + 1}, {count} callers: {seen}", file=sys.stderr, flush=True)
                measured[count].append(seen)
    stand, load, start, reviews = stand_of(REVIEW_MS)
    with stand:
        blown = [storm(start, load, reviews) for _ in range(settings.rounds)]
    for seen in blown:
        print(f"    storm: {seen}", file=sys.stderr, flush=True)

    words = []
    for count, rounds in measured.items():
        for key in ("first_us", "cpu_us", "rss_mib"):
            words.append(f"callers_{count}_{key}={statistics.median(it[key] for it in rounds):.1f}")
    calm, stormy = (statistics.median(it[key] for it in blown) for key in ("calm", "storm"))
    print(
        f"RESULT {' '.join(words)} calm_p99_us={calm:.0f} storm_p99_us={stormy:.0f} "
        f"storm_calls={sum(sum(it['told'].values()) for it in blown)} storm_reviews={sum(it['total'] for it in blown)} "
        f"reviews_at_once={max(it['peak'] for it in blown)}"
    )


if __name__ == "__main__":
    main()
