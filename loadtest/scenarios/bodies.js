// Bodies of 100 bytes, 64 KiB and nearly 1 MiB, there and back, of all functions of KRUNTIMES_URL at once: is each
// answered whole?
//   KRUNTIMES_ROUNDS   calls of each function; 30
//   KRUNTIMES_P99_MS   what 99 of 100 calls must stay below; 2000
import http from "k6/http";
import exec from "k6/execution";
import { call, number, options as shared, ownTarget, targets } from "../lib/target.js";
import { isOwn, settle } from "../lib/outcome.js";
import { warm } from "../lib/pace.js";
import { summarize } from "../lib/summary.js";

// The limit is 1,048,576 bytes each way; the answer says a little more than the request.
const sizes = [100, 64 * 1024, 1024 * 1024 - 256];
const rounds = number("KRUNTIMES_ROUNDS", 30);

export const options = {
  ...shared,
  scenarios: {
    bodies: { executor: "per-vu-iterations", vus: targets.length, iterations: rounds, maxDuration: "5m" },
  },
  thresholds: {
    "checks{scenario:bodies}": ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: [`count==${targets.length * rounds}`],
    "http_req_duration{scenario:bodies}": [`p(99)<${number("KRUNTIMES_P99_MS", 2000)}`],
  },
};

export { warm as setup };

export default function () {
  const id = `bodies-${exec.vu.idInTest}-${exec.vu.iterationInScenario}`;
  const url = ownTarget(exec.vu);
  const name = "x".repeat(sizes[exec.vu.iterationInScenario % sizes.length]);
  const answer = http.post(url, JSON.stringify({ name }), call(id));
  settle(id, answer, { "the whole body came back": (r) => isOwn(r, url, name) });
}

export function handleSummary(data) {
  const mebibytes = (name) => Math.round(((data.metrics[name] || { values: {} }).values.count || 0) / 1024 / 1024);
  return summarize(data, "bodies", {
    figures: { sent_mib: mebibytes("data_sent"), received_mib: mebibytes("data_received") },
  });
}
