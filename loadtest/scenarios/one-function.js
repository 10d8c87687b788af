// Twenty callers at once of a function that runs one call at a time: each gets its answer, or is told at once
// that the function is busy and has not run. Nothing else may happen.
import http from "k6/http";
import { call, number, options as shared, target } from "../lib/target.js";
import { isBusy, isOwn, settle } from "../lib/outcome.js";
import { summarize } from "../lib/summary.js";

// A 429 is an answer here, not a failed request.
http.setResponseCallback(http.expectedStatuses(200, 429));

export const options = {
  ...shared,
  scenarios: {
    "one-function": { executor: "per-vu-iterations", vus: 20, iterations: 25, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    // Both happen, or it was no crowd.
    answered_calls: ["count>0"],
    busy_calls: ["count>0"],
    http_reqs: ["count==500"],
    "http_req_duration{scenario:one-function}": [`p(99)<${number("KRUNTIMES_P99_MS", 1000)}`],
  },
};

export default function () {
  const id = `one-function-${__VU}-${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name: id }), call(id));
  settle(id, answer, {
    "answered to its own input, or busy and not run": (r) => isOwn(r, target, id) || isBusy(r),
  });
}

export function handleSummary(data) {
  return summarize(data, "one-function");
}
