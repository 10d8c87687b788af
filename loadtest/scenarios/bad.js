// Requests as they should not be, between good ones: each gets the status and reason that belong to it, says that
// nothing has run, and harms nobody.
//   KRUNTIMES_ROUNDS   how often each of four callers makes every mistake; 10
import http from "k6/http";
import { call, number, options as shared, target } from "../lib/target.js";
import { field, isBusy, isOwn, settle } from "../lib/outcome.js";
import { summarize } from "../lib/summary.js";

// A header that is null is left out.
const cases = [
  { what: "no token", headers: { Authorization: null }, status: 401, reason: "Unauthenticated" },
  { what: "a token of nobody", headers: { Authorization: "Bearer nobody" }, status: 401, reason: "Unauthenticated" },
  { what: "another scheme", headers: { Authorization: "Basic bm9ib2R5" }, status: 401, reason: "Unauthenticated" },
  { what: "another content type", headers: { "Content-Type": "text/plain" }, status: 415, reason: "UnsupportedMediaType" },
  { what: "a packed body", headers: { "Content-Encoding": "gzip" }, status: 415, reason: "UnsupportedContentEncoding" },
  { what: "an odd timeout", headers: { "X-Kruntime-Timeout-Millis": "soon" }, status: 400, reason: "InvalidTimeout" },
  {
    what: "an id that is none",
    headers: { "X-Kruntime-Invocation-ID": "x".repeat(129) },
    strangeId: true,
    status: 400,
    reason: "InvalidInvocationId",
  },
  { what: "headers too long", headers: { "X-Long": "x".repeat(70 * 1024) }, status: 431, reason: "HeadersTooLarge" },
  { what: "no JSON", body: "{", status: 400, reason: "InvalidPayload" },
  { what: "JSON nested too deep", body: "[".repeat(129) + "]".repeat(129), status: 400, reason: "InvalidPayload" },
  { what: "too large a body", body: `"${"x".repeat(1024 * 1024)}"`, status: 413, reason: "PayloadTooLarge" },
  { what: "another method", method: "PUT", status: 405, reason: "MethodNotAllowed" },
  { what: "a page that asks", method: "OPTIONS", status: 405, reason: "MethodNotAllowed" },
  { what: "another path", url: (url) => `${url}/`, status: 404, reason: "NoSuchRoute" },
  { what: "an encoded path", url: (url) => url.replace("/v1/", "/v1/%6e/"), status: 404, reason: "NoSuchRoute" },
  {
    what: "a function that is not there",
    url: (url) => url.replace(/functions\/[^:]+/, "functions/00000000-0000-4000-8000-000000000000"),
    status: 404,
    reason: "NoSuchFunction",
  },
];

const callers = 4;
const rounds = number("KRUNTIMES_ROUNDS", 10);

export const options = {
  ...shared,
  scenarios: {
    bad: { executor: "per-vu-iterations", vus: callers, iterations: rounds, maxDuration: "5m" },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    http_reqs: [`count==${callers * rounds * (cases.length + 1)}`],
    "http_req_duration{scenario:bad}": [`p(99)<${number("KRUNTIMES_P99_MS", 1000)}`],
  },
};

http.setResponseCallback(http.expectedStatuses({ min: 200, max: 431 }));

function make(bad, id) {
  const params = call(id);
  for (const [name, value] of Object.entries(bad.headers || {})) {
    if (value === null) {
      delete params.headers[name];
    } else {
      params.headers[name] = value;
    }
  }
  return http.request(bad.method || "POST", bad.url ? bad.url(target) : target, bad.body || "null", params);
}

export default function () {
  for (const [at, bad] of cases.entries()) {
    const id = `bad-${__VU}-${__ITER}-${at}`;
    const answer = make(bad, id);
    // Busy is the word of a function that another user of this scenario is calling.
    const mayBeBusy = bad.reason === "InvalidPayload";
    // The answer carries the request's id, unless that is what is wrong.
    settle(bad.strangeId ? answer.headers["X-Kruntime-Invocation-Id"] : id, answer, {
      [`${bad.what}: ${bad.status} ${bad.reason}, and nothing has run`]: (r) =>
        (r.status === bad.status && field(r, "reason") === bad.reason && field(r, "dispatched") === "no") ||
        (mayBeBusy && isBusy(r)),
    });
  }
  const id = `good-${__VU}-${__ITER}`;
  const answer = http.post(target, JSON.stringify({ name: id }), call(id));
  settle(id, answer, {
    "a good call between them is answered, or the function is busy": (r) => isOwn(r, target, id) || isBusy(r),
  });
}

export function handleSummary(data) {
  return summarize(data, "bad", { figures: { mistakes: cases.length } });
}
