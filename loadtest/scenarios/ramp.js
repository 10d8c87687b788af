// More and more calls a second (an open model), over all functions of KRUNTIMES_URL, up to more than the path can take:
// what is too much is dropped by the load itself or told 429 or 503, and whoever is answered is answered rightly.
//   KRUNTIMES_RATE       calls a second at the end; 2000
//   KRUNTIMES_DURATION   of the way there, such as 30s
//   KRUNTIMES_P99_MS     what 99 of 100 calls must stay below, at saturation too; 2000
import http from "k6/http";
import exec from "k6/execution";
import { call, number, options as shared, ownTarget, seconds, targets } from "../lib/target.js";
import { isHarmless, isOwn, settle } from "../lib/outcome.js";
import { warm } from "../lib/pace.js";
import { summarize } from "../lib/summary.js";

// At its limit the path says so: that is an answer.
http.setResponseCallback(http.expectedStatuses(200, 429, 503));

const length = seconds("KRUNTIMES_DURATION", "30s");

export const options = {
  ...shared,
  scenarios: {
    ramp: {
      executor: "ramping-arrival-rate",
      startRate: 10,
      timeUnit: "1s",
      stages: [{ target: number("KRUNTIMES_RATE", 2000), duration: `${length}s` }],
      // Two callers of each function: the second of them learns what Busy is.
      preAllocatedVUs: targets.length * 2,
      maxVUs: targets.length * 2,
    },
  },
  thresholds: {
    "checks{scenario:ramp}": ["rate==1"],
    failed_calls: ["count==0"],
    // What is not dropped at the end has not been too much: then the ramp was too short.
    dropped_iterations: ["count>0"],
    "answered_calls{part:last}": ["count>0"],
    "http_req_duration{scenario:ramp}": [`p(99)<${number("KRUNTIMES_P99_MS", 2000)}`],
  },
};

export { warm as setup };

export default function () {
  const id = `ramp-${exec.vu.idInTest}-${exec.vu.iterationInScenario}`;
  const url = ownTarget(exec.vu);
  const answer = http.post(url, JSON.stringify({ name: id }), call(id));
  const right = (r) => isOwn(r, url, id) || isHarmless(r);
  settle(
    id,
    answer,
    { "answered to its own input, or told that nothing has run": right },
    { part: exec.scenario.progress > 2 / 3 ? "last" : "before" },
  );
}

export function handleSummary(data) {
  const last = data.metrics["answered_calls{part:last}"].values.count || 0;
  return summarize(data, "ramp", {
    figures: { saturated_requests_per_second: Math.round(last / (length / 3)) },
    hints: { dropped_iterations: "the path took all of it: give a larger KRUNTIMES_RATE" },
  });
}
