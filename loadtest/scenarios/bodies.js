// Bodies of 100 bytes, 64 KiB and nearly 1 MiB, there and back: is each answered whole?
import http from "k6/http";
import { check } from "k6";
import { Counter } from "k6/metrics";
import { call, options as shared, target } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");
const sizes = [100, 64 * 1024, 1000 * 1000];

export const options = {
  ...shared,
  scenarios: {
    bodies: { executor: "shared-iterations", vus: 1, iterations: 60, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    http_reqs: ["count==60"],
  },
};

export default function () {
  const id = `bodies-${__VU}-${__ITER}`;
  const name = "x".repeat(sizes[__ITER % sizes.length]);
  const answer = http.post(target, JSON.stringify({ name }), call(id));
  const right = check(answer, {
    "the whole body came back": (r) => r.status === 200 && r.json("hello") === name,
    "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 200)}`);
  }
}

export function handleSummary(data) {
  return summarize(data, "bodies");
}
