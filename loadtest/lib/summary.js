// What a scenario prints at its end: the figures as JSON, then one RESULT line for scripts.

const micros = (millis) => Math.round((millis || 0) * 1000);

export function summarize(data, scenario) {
  const values = (name) => (data.metrics[name] || { values: {} }).values;
  // Without what a set-up calls, where a scenario tells the two apart.
  const measured = `http_req_duration{scenario:${scenario}}`;
  const duration = values(data.metrics[measured] ? measured : "http_req_duration");
  const thresholds = {};
  for (const [name, metric] of Object.entries(data.metrics)) {
    for (const [text, outcome] of Object.entries(metric.thresholds || {})) {
      thresholds[`${name} ${text}`] = outcome.ok;
    }
  }
  const summary = {
    scenario,
    calls: values("http_reqs").count || 0,
    failed: values("failed_calls").count || 0,
    dropped: values("dropped_iterations").count || 0,
    // Only where a scenario provokes it.
    busy: (data.metrics.busy_calls && values("busy_calls").count) || undefined,
    requests_per_second: Math.round((values("http_reqs").rate || 0) * 10) / 10,
    duration_us: {
      min: micros(duration.min),
      p50: micros(duration.med),
      p95: micros(duration["p(95)"]),
      p99: micros(duration["p(99)"]),
      max: micros(duration.max),
    },
    handshake_us_max: micros(values("http_req_tls_handshaking").max),
    thresholds,
  };
  const line =
    `RESULT p50_us=${summary.duration_us.p50} p99_us=${summary.duration_us.p99}` +
    ` requests_per_second=${summary.requests_per_second} failed=${summary.failed}`;
  return { stdout: `${JSON.stringify(summary, null, 2)}\n${line}\n` };
}
