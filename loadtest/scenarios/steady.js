// Calls at a constant rate over all functions of KRUNTIMES_URL: does the path keep up, and how long does a call take?
//   KRUNTIMES_RATE       calls a second, all functions together; 50
//   KRUNTIMES_DURATION   such as 30s
//   KRUNTIMES_P99_MS     what 99 of 100 calls must stay below; 250
import { number, options as shared } from "../lib/target.js";
import { callOwn, pace, rate, warm } from "../lib/pace.js";
import { summarize } from "../lib/summary.js";

export const options = {
  ...shared,
  scenarios: { steady: pace("30s") },
  thresholds: {
    "checks{scenario:steady}": ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: ["count>0"],
    // Five in a hundred may find every function busy.
    dropped_iterations: [`rate<${rate * 0.05}`],
    "http_req_duration{scenario:steady}": [`p(99)<${number("KRUNTIMES_P99_MS", 250)}`],
  },
};

export { warm as setup };

export default function () {
  callOwn("steady");
}

export function handleSummary(data) {
  return summarize(data, "steady");
}
