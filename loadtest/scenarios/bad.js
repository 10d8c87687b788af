// Requests as they should not be, between good ones: each gets the status and reason that belong to it, says that
// nothing has run, and harms nobody.
import http from "k6/http";
import { check } from "k6";
import { Counter } from "k6/metrics";
import { call, options as shared, target } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");

export const options = {
  ...shared,
  scenarios: {
    bad: { executor: "per-vu-iterations", vus: 4, iterations: 10, maxDuration: "60s" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
  },
};

// A header that is null is left out.
const cases = [
  { what: "no token", headers: { Authorization: null }, status: 401, reason: "Unauthenticated" },
  { what: "a token of nobody", headers: { Authorization: "Bearer nobody" }, status: 401, reason: "Unauthenticated" },
  { what: "another scheme", headers: { Authorization: "Basic bm9ib2R5" }, status: 401, reason: "Unauthenticated" },
  { what: "another content type", headers: { "Content-Type": "text/plain" }, status: 415, reason: "UnsupportedMediaType" },
  { what: "a packed body", headers: { "Content-Encoding": "gzip" }, status: 415, reason: "UnsupportedMediaType" },
  { what: "an odd timeout", headers: { "X-Kruntime-Timeout-Millis": "soon" }, status: 400, reason: "InvalidTimeout" },
  { what: "no JSON", body: "{", status: 400, reason: "InvalidPayload" },
  { what: "too large a body", body: `"${"x".repeat(1024 * 1024)}"`, status: 413, reason: "PayloadTooLarge" },
  { what: "another method", method: "PUT", status: 405, reason: "MethodNotAllowed" },
  { what: "another path", url: (url) => `${url}/`, status: 404, reason: "NoSuchRoute" },
  {
    what: "a function that is not there",
    url: (url) => url.replace(/functions\/[^:]+/, "functions/00000000-0000-4000-8000-000000000000"),
    status: 404,
    reason: "NoSuchFunction",
  },
];

http.setResponseCallback(http.expectedStatuses({ min: 200, max: 429 }));

export default function () {
  for (const [at, bad] of cases.entries()) {
    const id = `bad-${__VU}-${__ITER}-${at}`;
    const params = call(id);
    for (const [name, value] of Object.entries(bad.headers || {})) {
      if (value === null) {
        delete params.headers[name];
      } else {
        params.headers[name] = value;
      }
    }
    const url = bad.url ? bad.url(target) : target;
    const answer = http.request(bad.method || "POST", url, bad.body || "null", params);
    // Busy is the word of a function that another user of this scenario is calling.
    const busy = answer.status === 429 && bad.reason === "InvalidPayload";
    const right = check(answer, {
      "status, reason and dispatched are those of the fault": (r) =>
        busy || (r.status === bad.status && r.json("reason") === bad.reason && r.json("dispatched") === "no"),
      "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
    });
    if (!right) {
      failed.add(1);
      console.error(`${bad.what}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
    }
  }
  const id = `good-${__VU}-${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name: id }), call(id));
  const right = check(answer, {
    "a good call between them is answered, or the function is busy": (r) =>
      r.status === 429 || (r.status === 200 && r.json("hello") === id),
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
  }
}

export function handleSummary(data) {
  return summarize(data, "bad");
}
