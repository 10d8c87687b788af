// More and more calls a second (an open model), over all functions of KRUNTIMES_URL, up to more than the path can take:
// what is too much is dropped by the load itself or told 429 or 503, and whoever is answered is answered rightly.
//   KRUNTIMES_RATE       calls a second at the end; 2000
//   KRUNTIMES_DURATION   of the way there, such as 30s
import http from "k6/http";
import { check } from "k6";
import exec from "k6/execution";
import { Counter } from "k6/metrics";
import { call, options as shared, targets } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");
const busy = new Counter("busy_calls");

// At its limit the path says so: that is an answer.
http.setResponseCallback(http.expectedStatuses(200, 429, 503));

export const options = {
  ...shared,
  scenarios: {
    ramp: {
      executor: "ramping-arrival-rate",
      startRate: 10,
      timeUnit: "1s",
      stages: [{ target: Number(__ENV.KRUNTIMES_RATE || 2000), duration: __ENV.KRUNTIMES_DURATION || "30s" }],
      preAllocatedVUs: targets.length,
      maxVUs: targets.length * 2,
    },
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
  },
};

export default function () {
  const id = `ramp-${exec.vu.idInTest}-${exec.vu.iterationInScenario}`;
  const answer = http.post(targets[(exec.vu.idInTest - 1) % targets.length], JSON.stringify({ name: id }), call(id));
  const right = check(answer, {
    "answered to its own input, or told that nothing has run": (r) =>
      r.status === 200
        ? r.json("hello") === id
        : [429, 503].includes(r.status) && r.json("dispatched") === "no" && !!r.headers["Retry-After"],
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
  } else if (answer.status !== 200) {
    busy.add(1);
  }
}

export function handleSummary(data) {
  return summarize(data, "ramp");
}
