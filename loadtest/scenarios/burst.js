// Twenty callers at once of a function that runs one call at a time: each gets its answer, or is told at once
// that the function is busy and has not run. Nothing else may happen.
import http from "k6/http";
import { check } from "k6";
import { Counter } from "k6/metrics";
import { call, options as shared, target } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");
const answered = new Counter("answered_calls");
const busy = new Counter("busy_calls");

// A 429 is an answer here, not a failed request.
http.setResponseCallback(http.expectedStatuses(200, 429));

export const options = {
  ...shared,
  scenarios: {
    burst: { executor: "per-vu-iterations", vus: 20, iterations: 25, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: ["count>0"],
    http_reqs: ["count==500"],
  },
};

export default function () {
  const id = `burst-${__VU}-${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name: id }), call(id));
  const problem = answer.status === 429 ? answer.json() : {};
  const right = check(answer, {
    "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
    "answered to its own input, or busy and not run": (r) =>
      r.status === 200
        ? r.json("hello") === id
        : r.status === 429 && problem.reason === "Busy" && problem.dispatched === "no" && !!r.headers["Retry-After"],
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
  } else {
    (answer.status === 200 ? answered : busy).add(1);
  }
}

export function handleSummary(data) {
  return summarize(data, "burst");
}
