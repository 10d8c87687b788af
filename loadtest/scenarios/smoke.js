// A few calls, one after the other, of the function in examples/hello: is every answer right?
import http from "k6/http";
import { call, number, options as shared, target } from "../lib/target.js";
import { field, isOwn, settle } from "../lib/outcome.js";
import { summarize } from "../lib/summary.js";

export const options = {
  ...shared,
  scenarios: {
    smoke: { executor: "shared-iterations", vus: 1, iterations: 20, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: ["count==20"],
    "http_req_duration{scenario:smoke}": [`p(99)<${number("KRUNTIMES_P99_MS", 1000)}`],
  },
};

export default function () {
  const id = `smoke-${__VU}-${__ITER}`;
  const name = `caller ${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name }), call(id));
  settle(id, answer, {
    "status is 200": (r) => r.status === 200,
    "the content type is JSON": (r) => /^application\/json\b/.test(r.headers["Content-Type"] || ""),
    "the function answered to its input": (r) => isOwn(r, target, name),
    "the function knew the invocation id": (r) => field(r, "invocation") === id,
  });
}

export function handleSummary(data) {
  return summarize(data, "smoke");
}
