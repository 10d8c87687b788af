// A few calls, one after the other, of the function in examples/hello: is every answer right?
import http from "k6/http";
import { check } from "k6";
import { Counter } from "k6/metrics";
import { call, options as shared, target } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");

export const options = {
  ...shared,
  scenarios: {
    smoke: { executor: "shared-iterations", vus: 1, iterations: 20, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    http_reqs: ["count==20"],
  },
};

export default function () {
  const id = `smoke-${__VU}-${__ITER}`;
  const name = `caller ${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name }), call(id));
  const right = check(answer, {
    "status is 200": (r) => r.status === 200,
    "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
    "the content type is JSON": (r) => /^application\/json\b/.test(r.headers["Content-Type"] || ""),
    "the function answered to its input": (r) => r.status === 200 && r.json("hello") === name,
    "the function knew the invocation id": (r) => r.status === 200 && r.json("invocation") === id,
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
  }
}

export function handleSummary(data) {
  return summarize(data, "smoke");
}
