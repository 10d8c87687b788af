// What a scenario leaves at its end: the figures as JSON, one RESULT line for scripts, and which thresholds were missed.
// With KRUNTIMES_OUT, a folder, the figures also go there as SCENARIO.json and SCENARIO.html.
import { page } from "./html.js";
import { targets } from "./target.js";

const micros = (millis) => Math.round((millis || 0) * 1000);

// A trend in microseconds.
const trend = (values) => ({
  min: micros(values.min),
  p50: micros(values.med),
  p95: micros(values["p(95)"]),
  p99: micros(values["p(99)"]),
  max: micros(values.max),
});

// Every check, with how often it held.
function checks(group, found = []) {
  for (const it of group.checks || []) {
    found.push({ check: it.name, held: it.passes, broken: it.fails });
  }
  for (const inner of group.groups || []) {
    checks(inner, found);
  }
  return found;
}

// more.measured   the metric of the durations in the RESULT line, if it is not that of the scenario
// more.parts      further durations: name → metric
// more.figures    further numbers, which go to the RESULT line too
// more.hints      metric → what to do where its threshold is missed
export function summarize(data, scenario, more = {}) {
  const values = (name) => (data.metrics[name] || { values: {} }).values;
  const count = (name) => values(name).count || 0;
  const thresholds = {};
  const missed = [];
  for (const [name, metric] of Object.entries(data.metrics)) {
    for (const [text, outcome] of Object.entries(metric.thresholds || {})) {
      thresholds[`${name} ${text}`] = outcome.ok;
      if (!outcome.ok) {
        const hint = (more.hints || {})[name];
        missed.push(`${name} ${text}${hint ? ` (${hint})` : ""}; it was ${JSON.stringify(metric.values)}`);
      }
    }
  }
  const parts = {};
  for (const [name, metric] of Object.entries(more.parts || {})) {
    parts[name] = trend(values(metric));
  }
  const summary = {
    scenario,
    passed: missed.length === 0,
    ended: new Date().toISOString(),
    seconds: Math.round(data.state.testRunDurationMs / 100) / 10,
    settings: settings(),
    calls: count("http_reqs"),
    answered: count("answered_calls"),
    busy: count("busy_calls"),
    refused: count("refused_calls"),
    failed: count("failed_calls"),
    dropped: count("dropped_iterations"),
    requests_per_second: Math.round((values("http_reqs").rate || 0) * 10) / 10,
    duration_us: trend(values(more.measured || `http_req_duration{scenario:${scenario}}`)),
    parts_us: parts,
    handshake_us_max: micros(values("http_req_tls_handshaking").max),
    figures: more.figures || {},
    checks: checks(data.root_group),
    thresholds,
  };
  const words = {
    p50_us: summary.duration_us.p50,
    p99_us: summary.duration_us.p99,
    requests_per_second: summary.requests_per_second,
    failed: summary.failed,
    refused: summary.refused || undefined,
    ...summary.figures,
  };
  const line = Object.entries(words).filter(([, value]) => value !== undefined);
  const json = JSON.stringify(summary, null, 2);
  // A scenario that refused to begin has no result.
  const began = summary.answered + summary.busy + summary.refused + summary.failed > 0;
  const left = {
    stdout: began ? `${json}\nRESULT ${line.map((word) => word.join("=")).join(" ")}\n` : `${json}\n`,
    stderr: missed.map((it) => `threshold missed: ${it}\n`).join(""),
  };
  if (__ENV.KRUNTIMES_OUT) {
    left[`${__ENV.KRUNTIMES_OUT}/${scenario}.json`] = `${json}\n`;
    left[`${__ENV.KRUNTIMES_OUT}/${scenario}.html`] = page(summary);
  }
  return left;
}

// What was asked for.
function settings() {
  const found = {};
  for (const name of ["RATE", "DURATION", "P99_MS", "CONNECTIONS", "HTTP", "ROUNDS", "VUS", "ROLL", "COLD_RATE", "COLD_P99_MS"]) {
    const value = __ENV[`KRUNTIMES_${name}`];
    if (value) {
      found[`KRUNTIMES_${name}`] = value;
    }
  }
  found.functions = targets.length;
  return found;
}
