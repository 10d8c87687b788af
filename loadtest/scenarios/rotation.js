// Calls at a steady pace while certificates change: those of the gateways, and those of the hop with their CA; dev/load
// does that as soon as this says that it has begun. Nobody may notice: no call fails or is refused.
//   KRUNTIMES_RATE          calls a second, all functions together; 50
//   KRUNTIMES_DURATION      longer than the change takes; 4m
//   KRUNTIMES_CONNECTIONS   new (each call verifies the certificate) or kept (from call to call)
//   KRUNTIMES_HTTP          2 or 1.1
//   KRUNTIMES_P99_MS        what 99 of 100 calls must stay below; 1000
import { choice, number, options as shared } from "../lib/target.js";
import { callOwn, pace, rate, warm } from "../lib/pace.js";
import { summarize } from "../lib/summary.js";

export const options = {
  ...shared,
  noConnectionReuse: choice("KRUNTIMES_CONNECTIONS", ["new", "kept"]) === "new",
  scenarios: { rotation: pace("4m") },
  thresholds: {
    "checks{scenario:rotation}": ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: ["count>0"],
    refused_calls: ["count==0"],
    dropped_iterations: [`rate<${rate * 0.05}`],
    "http_req_duration{scenario:rotation}": [`p(99)<${number("KRUNTIMES_P99_MS", 1000)}`],
  },
};

export function setup() {
  warm();
  console.log("the load begins");
}

export default function () {
  callOwn("rotation");
}

export function handleSummary(data) {
  return summarize(data, "rotation");
}
