// A summary as one page of HTML that needs nothing else: no script, no network.

const escape = (text) =>
  String(text).replace(/[&<>"']/g, (mark) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[mark]);

const STYLE = `
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #18794e; } .bad { color: #cd2b31; font-weight: 600; }
svg { width: 100%; height: 1rem; } svg rect { fill: #3b82f6; }
`;

// Cells are text, which is escaped, or { html }, which is not; numbers stand at the right.
function cell(value) {
  if (typeof value === "number") {
    return `<td class="number">${String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",")}</td>`;
  }
  return `<td>${value && value.html !== undefined ? value.html : escape(value)}</td>`;
}

function table(head, rows) {
  const titles = head.map((it) => `<th>${escape(it)}</th>`).join("");
  const lines = rows.map((row) => `<tr>${row.map(cell).join("")}</tr>`).join("\n");
  return `<table>\n<tr>${titles}</tr>\n${lines}\n</table>`;
}

const verdict = (good, yes, no) => ({ html: `<span class="${good ? "good" : "bad"}">${good ? yes : no}</span>` });

const bar = (share) => ({
  html: `<svg viewBox="0 0 100 10" preserveAspectRatio="none"><rect width="${(share * 100).toFixed(1)}" height="10"/></svg>`,
});

// Durations side by side; bars compare the p99 of each with the longest.
function durations(summary) {
  const all = { calls: summary.duration_us, ...summary.parts_us };
  const longest = Math.max(1, ...Object.values(all).map((it) => it.p99));
  const rows = Object.entries(all).map(([name, it]) => [
    name.replaceAll("_", " "),
    it.min,
    it.p50,
    it.p95,
    it.p99,
    it.max,
    bar(it.p99 / longest),
  ]);
  return table(["µs", "min", "p50", "p95", "p99", "max", "p99"], rows);
}

export function page(summary) {
  const figures = {
    calls: summary.calls,
    "answered as they should be": summary.answered,
    "busy (429)": summary.busy,
    "refused, nothing has run (503)": summary.refused,
    failed: summary.failed,
    "dropped by the load itself": summary.dropped,
    "calls a second": summary.requests_per_second,
    "longest TLS handshake, µs": summary.handshake_us_max,
    ...summary.figures,
  };
  const kept = Object.entries(summary.thresholds).map(([name, ok]) => [name, verdict(ok, "kept", "missed")]);
  const checks = summary.checks.map((it) => [it.check, it.held, verdict(it.broken === 0, "0", it.broken)]);
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>${escape(summary.scenario)}: ${summary.passed ? "passed" : "failed"}</title>
<style>${STYLE}</style>
<h1>${escape(summary.scenario)} ${verdict(summary.passed, "passed", "failed").html}</h1>
<p>${escape(summary.seconds)} s, until ${escape(summary.ended)}. Load generator, gateway and functions may have shared one machine.</p>
<h2>Thresholds</h2>
${table(["threshold", ""], kept)}
<h2>Calls</h2>
${table(["", ""], Object.entries(figures).map(([name, value]) => [name.replaceAll("_", " "), value]))}
<h2>How long they took</h2>
${durations(summary)}
<h2>Checks</h2>
${table(["check", "held", "broken"], checks)}
<h2>Settings</h2>
${table(["name", "value"], Object.entries(summary.settings))}
</html>
`;
}
