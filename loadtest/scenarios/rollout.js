// Calls at a steady pace while gateways, and then the Pods that run the functions, are replaced; dev/load does that
// as soon as this says that it has begun. With gateways replaced no call fails. A function that moves to another Pod
// is waited for; where that takes longer, callers are told that nothing has run, with a reason that says so.
//   KRUNTIMES_ROLL          what is replaced: gateway, pool, or both; gateway
//   KRUNTIMES_RATE          calls a second, all functions together; 50
//   KRUNTIMES_DURATION      longer than the replacement takes; 2m
//   KRUNTIMES_CONNECTIONS   kept (from call to call) or new (one for each call)
//   KRUNTIMES_HTTP          2 or 1.1
//   KRUNTIMES_P99_MS        what 99 of 100 calls must stay below; 1000, or with a pool 4000
import { number, options as shared } from "../lib/target.js";
import { callOwn, pace, rate, warm } from "../lib/pace.js";
import { field, isHarmless } from "../lib/outcome.js";
import { summarize } from "../lib/summary.js";

const pool = (__ENV.KRUNTIMES_ROLL || "gateway").split(/\s+/).includes("pool");

export const options = {
  ...shared,
  scenarios: { rollout: pace("2m") },
  thresholds: {
    "checks{scenario:rollout}": ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: ["count>0"],
    // Two in a hundred may come while their function moves for longer than a gateway waits for it.
    refused_calls: [pool ? `rate<${rate * 0.02}` : "count==0"],
    // Callers wait for a function that moves, and then find it busy.
    dropped_iterations: [`rate<${rate * (pool ? 0.1 : 0.05)}`],
    "http_req_duration{scenario:rollout}": [`p(99)<${number("KRUNTIMES_P99_MS", pool ? 4000 : 1000)}`],
  },
};

export function setup() {
  warm();
  console.log("the load begins");
}

// What is said of a function that moves, or of the Pod that it leaves (docs/reasons.md).
const MOVES = ["Draining", "Recovering", "Registering", "StaleRoute", "OwnerUnreachable"];
const moves = (answer) => pool && isHarmless(answer) && MOVES.includes(field(answer, "reason"));

export default function () {
  callOwn("rollout", moves);
}

export function handleSummary(data) {
  return summarize(data, "rollout");
}
