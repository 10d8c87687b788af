// Many functions, each called in turn and in every round: each answers to its own input, from its own process, which
// counts its calls. Functions must be copies as dev/load makes them, which tell the UID of their Run.
//   KRUNTIMES_VUS       callers at once, each with functions of its own; 10
//   KRUNTIMES_ROUNDS    how often each function is called; 20
//   KRUNTIMES_P99_MS    what 99 of 100 calls must stay below; 1000
import http from "k6/http";
import { fail } from "k6";
import exec from "k6/execution";
import { call, number, options as shared, targets, uidOf } from "../lib/target.js";
import { field, isOwn, settle } from "../lib/outcome.js";
import { summarize } from "../lib/summary.js";

const callers = Math.min(number("KRUNTIMES_VUS", 10), targets.length);
const rounds = number("KRUNTIMES_ROUNDS", 20);

export const options = {
  ...shared,
  scenarios: {
    "many-functions": { executor: "per-vu-iterations", vus: callers, iterations: rounds, maxDuration: "10m" },
  },
  thresholds: {
    "checks{scenario:many-functions}": ["rate==1"],
    failed_calls: ["count==0"],
    answered_calls: [`count==${targets.length * rounds}`],
    "http_req_duration{scenario:many-functions}": [`p(99)<${number("KRUNTIMES_P99_MS", 1000)}`],
  },
};

export function setup() {
  if (new Set(targets).size < 2) {
    fail("many functions are at least two: KRUNTIMES_URL has one");
  }
  const answer = http.post(targets[0], "{}", call("many-functions-first"));
  if (answer.status !== 200 || field(answer, "run") !== uidOf(targets[0])) {
    fail(`functions must tell the UID of their Run as "run"; the first answered ${answer.status} ${answer.body || answer.error}`);
  }
}

// How often each function of this caller has run, as it said itself.
const ran = {};

// One round over the functions of this caller; nobody else calls them.
export default function () {
  for (let at = exec.vu.idInTest - 1; at < targets.length; at += callers) {
    const id = `many-functions-${at}-${exec.vu.iterationInScenario}`;
    const answer = http.post(targets[at], JSON.stringify({ name: id }), call(id));
    const before = ran[at];
    ran[at] = field(answer, "calls");
    settle(id, answer, {
      "the function of this Run answered to its own input": (r) => isOwn(r, targets[at], id) && !!field(r, "run"),
      "its process ran this call and no other": () => before === undefined || ran[at] === before + 1,
    });
  }
}

export function handleSummary(data) {
  return summarize(data, "many-functions", { figures: { functions: targets.length } });
}
