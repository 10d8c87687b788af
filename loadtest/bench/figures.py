"""Records → a table, a plot and the RESULT line. Reads no clock, no file, no process."""

from html import escape
from statistics import median

REFERENCE = "envoy"
OURS = "kruntimes"
HEADLINE = "h1_c16_100b"
COLOURS = {
    "kruntimes": "#d1495b",
    "envoy": "#30638e",
    "envoy-authz": "#003d5b",
    "nginx": "#00798c",
    "plain": "#8d96a3",
    "envoy-plaintext": "#8fb3d1",
    "nginx-plaintext": "#80c4ce",
    "direct": "#dddddd",
}


def values(results: dict, target: str, cell: str, key: str) -> list[float]:
    return [it[key] for it in results["records"] if it["target"] == target and it["cell"] == cell]


def middle(results: dict, target: str, cell: str, key: str) -> float | None:
    found = values(results, target, cell, key)
    return median(found) if found else None


def ratio(results: dict, target: str, other: str, cell: str, key: str) -> float | None:
    """Of the medians; None where there is nothing to divide."""
    mine, theirs = middle(results, target, cell, key), middle(results, other, cell, key)
    return mine / theirs if mine and theirs else None


def targets_of(results: dict) -> list[str]:
    present = {it["target"] for it in results["records"]}
    return [name for name in COLOURS if name in present]


def describe(cell: dict) -> str:
    size = cell["body"]
    bytes_ = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
    http = "HTTP/1.1" if cell["http"] == "h1" else "HTTP/2"
    text = f"{http}, {cell['connections']} connection{'s' if cell['connections'] > 1 else ''}"
    if cell["streams"] > 1:
        text += f" x {cell['streams']} streams"
    text += f", {bytes_}"
    return text + (f", {cell['rate']} calls a second" if cell["rate"] else "")


def table(results: dict) -> str:
    about = results["about"]
    lines = [
        "# Gateways side by side",
        "",
        f"Medians of {about['rounds']} rounds, in brackets the least and the most. {about['processors']} processors, which h2load, "
        f"gateway and backend share; {about['threads']} thread(s) for each gateway; {about['routes']} routes; "
        f"load average before {about['load_before']:.2f}; kernel {about['kernel']}; {about['h2load']}.",
    ]
    for cell in results["cells"]:
        lines += [
            "",
            f"## {describe(cell)} (`{cell['name']}`)",
            "",
            "| target | calls/s | p50 us | p99 us | CPU us/call | to Envoy: CPU | to Envoy: p99 | peak MiB | machine busy |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [row(results, target, cell["name"]) for target in targets_of(results)]
    return "\n".join(lines) + "\n"


def row(results: dict, target: str, cell: str) -> str:
    def spread(key: str, digits: int) -> str:
        found = values(results, target, cell, key)
        return f"{median(found):.{digits}f} ({min(found):.{digits}f}-{max(found):.{digits}f})"

    def share(key: str) -> str:
        found = ratio(results, target, REFERENCE, cell, key)
        return f"{found:.2f}" if found else "-"

    runs = target != "direct"
    cells = [
        target,
        spread("requests_per_second", 0),
        spread("p50_us", 0),
        spread("p99_us", 0),
        spread("cpu_us", 1) if runs else "-",
        share("cpu_us"),
        share("p99_us"),
        f"{middle(results, target, cell, 'peak_mib'):.0f}" if runs else "-",
        f"{middle(results, target, cell, 'busy'):.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def result_line(results: dict) -> str:
    """`cpu_ratio_to_envoy` and `p99_ratio_to_envoy` are of the headline's cell; other cells are named."""
    words = []

    def say(name: str, value: float | None, digits: int = 3) -> None:
        if value is not None:
            words.append(f"{name}={value:.{digits}f}")

    names = [cell["name"] for cell in results["cells"]]
    # The headline first.
    for cell in sorted(names, key=lambda name: name != HEADLINE):
        suffix = "" if cell == HEADLINE else f"_{cell}"
        say(f"cpu_ratio_to_envoy{suffix}", ratio(results, OURS, "envoy", cell, "cpu_us"))
        say(f"p99_ratio_to_envoy{suffix}", ratio(results, OURS, "envoy", cell, "p99_us"))
        if cell == HEADLINE:
            say("cpu_ratio_to_envoy_authz", ratio(results, OURS, "envoy-authz", cell, "cpu_us"))
            say("cpu_ratio_to_nginx", ratio(results, OURS, "nginx", cell, "cpu_us"))
            say("cpu_us", middle(results, OURS, cell, "cpu_us"), 1)
            say("p99_us", middle(results, OURS, cell, "p99_us"), 0)
            say("requests_per_second", middle(results, OURS, cell, "requests_per_second"), 0)
            say("peak_mib", middle(results, OURS, cell, "peak_mib"), 1)
        else:
            say(f"cpu_us_{cell}", middle(results, OURS, cell, "cpu_us"), 1)
            say(f"p99_us_{cell}", middle(results, OURS, cell, "p99_us"), 0)
    return " ".join(["RESULT", f"routes={results['about']['routes']}", *words])


# === the plot ===

BAR, GAP, HEAD, LABEL, WIDTH = 14, 4, 26, 120, 300


def plot(results: dict) -> str:
    """One group of bars for each cell; left CPU, right p99, each group with its own scale."""
    names = targets_of(results)
    height = HEAD + len(names) * (BAR + GAP) + 14
    across = LABEL + 2 * (WIDTH + 90)
    parts = []
    for number, cell in enumerate(results["cells"]):
        top = 30 + number * height
        parts.append(f'<text x="8" y="{top + 14}" font-weight="bold">{escape(describe(cell))}</text>')
        for side, (key, unit) in enumerate((("cpu_us", "CPU us/call"), ("p99_us", "p99 us"))):
            left = LABEL + side * (WIDTH + 90)
            known = {name: middle(results, name, cell["name"], key) or 0 for name in names}
            most = max(known.values()) or 1
            for at, name in enumerate(names):
                y = top + HEAD + at * (BAR + GAP)
                if side == 0:
                    parts.append(f'<text x="8" y="{y + 11}">{escape(name)}</text>')
                if known[name]:
                    long = known[name] / most * WIDTH
                    parts.append(f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{BAR}" fill="{COLOURS[name]}"/>')
                    digits = 1 if known[name] < 1000 and key == "cpu_us" else 0
                    parts.append(f'<text x="{left + long + 4:.1f}" y="{y + 11}">{known[name]:.{digits}f}</text>')
            if number == 0:
                parts.append(f'<text x="{left}" y="18" font-weight="bold">{unit}</text>')
    total = 30 + height * len(results["cells"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{total}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )
