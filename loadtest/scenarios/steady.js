// Calls at a constant rate, whatever the answers take (an open model), over all functions of KRUNTIMES_URL: does
// the path keep up, and how long does a call take? Each virtual user has a function of its own, because a function
// runs one call at a time; a call that finds none of them free counts as dropped.
//   KRUNTIMES_RATE       calls a second, all functions together; 50
//   KRUNTIMES_DURATION   such as 30s
//   KRUNTIMES_P99_MS     what 99 of 100 calls must stay below; 250
import http from "k6/http";
import { check, fail } from "k6";
import exec from "k6/execution";
import { Counter } from "k6/metrics";
import { call, options as shared, targets } from "../lib/target.js";
import { summarize } from "../lib/summary.js";

const failed = new Counter("failed_calls");

const number = (name, usual) => {
  const value = Number(__ENV[name] || usual);
  if (!(value > 0)) {
    throw new Error(`${name} must be a number above 0`);
  }
  return value;
};

export const options = {
  ...shared,
  scenarios: {
    steady: {
      executor: "constant-arrival-rate",
      rate: number("KRUNTIMES_RATE", 50),
      timeUnit: "1s",
      duration: __ENV.KRUNTIMES_DURATION || "30s",
      preAllocatedVUs: targets.length,
      maxVUs: targets.length,
    },
  },
  thresholds: {
    "checks{scenario:steady}": ["rate==1"],
    failed_calls: ["count==0"],
    // Five in a hundred may find every function busy.
    dropped_iterations: [`rate<${number("KRUNTIMES_RATE", 50) * 0.05}`],
    "http_req_duration{scenario:steady}": [`p(99)<${number("KRUNTIMES_P99_MS", 250)}`],
  },
};

// Every function answers before the clock starts: its process and the access review are warm.
export function setup() {
  for (const [at, url] of targets.entries()) {
    const answer = http.post(url, JSON.stringify({ name: "warm" }), call(`warm-${at}`));
    if (answer.status !== 200) {
      fail(`${url} is not ready for load: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
    }
  }
}

export default function () {
  const id = `steady-${exec.vu.idInTest}-${exec.vu.iterationInScenario}`;
  const answer = http.post(targets[(exec.vu.idInTest - 1) % targets.length], JSON.stringify({ name: id }), call(id));
  const right = check(answer, {
    "answered to its own input": (r) => r.status === 200 && r.json("hello") === id,
    "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
  });
  if (!right) {
    failed.add(1);
    console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
  }
}

export function handleSummary(data) {
  return summarize(data, "steady");
}
