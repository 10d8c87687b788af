// Callers that nobody has seen before: the first call of each costs an access review at the gateway and one at the
// owner. Are they let in or kept out rightly, and are callers that are known slowed down meanwhile? First the known
// callers are alone for 10 s, for comparison.
//   KRUNTIMES_CALLERS_FILE   a line for each new caller: 200 or 403, which is what it is to be told, and its token
//   KRUNTIMES_COLD_RATE      new callers a second; 5
//   KRUNTIMES_RATE           calls of known callers a second; 20
//   KRUNTIMES_P99_MS         what 99 of 100 calls of known callers must stay below meanwhile; 250
//   KRUNTIMES_COLD_P99_MS    the same for the first calls of new ones; 1000
import http from "k6/http";
import { fail } from "k6";
import { SharedArray } from "k6/data";
import exec from "k6/execution";
import { Counter, Trend } from "k6/metrics";
import { call, number, options as shared, ownTarget, targets } from "../lib/target.js";
import { field, isOwn, settle } from "../lib/outcome.js";
import { callOwn, warm } from "../lib/pace.js";
import { summarize } from "../lib/summary.js";

if (!__ENV.KRUNTIMES_CALLERS_FILE) {
  throw new Error("KRUNTIMES_CALLERS_FILE is empty: name a file with lines such as `200 TOKEN`; dev/load makes one");
}
const callers = new SharedArray("callers", () =>
  open(__ENV.KRUNTIMES_CALLERS_FILE)
    .trim()
    .split("\n")
    .map((line) => {
      const [status, token] = line.split(" ");
      return { status: Number(status), token };
    }),
);
const strangers = callers.filter((it) => it.status === 403).length;

const coldRate = number("KRUNTIMES_COLD_RATE", 5);
const rate = number("KRUNTIMES_RATE", 20);
// Each virtual user has a function of its own, whichever of the scenarios it is in.
const known = Math.ceil(targets.length / 2);
const fresh = targets.length - known;
const bound = [`p(99)<${number("KRUNTIMES_P99_MS", 250)}`];
const length = Math.ceil(callers.length / coldRate);

const first = new Trend("first_call_duration", true);
const again = new Trend("again_call_duration", true);
// What the gateway says that it took to know whether the caller may, in milliseconds.
const firstAuthz = new Trend("first_call_authorization", true);
const againAuthz = new Trend("again_call_authorization", true);
const kept = new Counter("kept_out_calls");

http.setResponseCallback(http.expectedStatuses(200, 403));

const pace = (vus, more) => ({
  executor: "constant-arrival-rate",
  timeUnit: "1s",
  preAllocatedVUs: vus,
  maxVUs: vus,
  // Long enough for a call; k6 counts the virtual users of a scenario until then.
  gracefulStop: "3s",
  ...more,
});

export const options = {
  ...shared,
  scenarios: {
    alone: pace(known, { rate, duration: "10s", exec: "callKnown" }),
    warm: pace(known, { rate, startTime: "13s", duration: `${length}s`, exec: "callKnown" }),
    cold: pace(fresh, { rate: coldRate, startTime: "13s", duration: `${length}s`, exec: "callNew" }),
  },
  thresholds: {
    checks: ["rate==1"],
    failed_calls: ["count==0"],
    // Each new caller calls twice; five in a hundred may find every function busy.
    "answered_calls{caller:new}": [`count>=${Math.floor((callers.length - strangers) * 2 * 0.95)}`],
    kept_out_calls: strangers ? [`count>=${Math.floor(strangers * 2 * 0.95)}`] : ["count==0"],
    // Sooner than this Kubernetes does not answer; later the cache does not.
    first_call_authorization: ["min>0.2"],
    again_call_authorization: ["med<0.2"],
    first_call_duration: [`p(99)<${number("KRUNTIMES_COLD_P99_MS", 1000)}`],
    "http_req_duration{scenario:alone}": bound,
    "http_req_duration{scenario:warm}": bound,
    "dropped_iterations{scenario:warm}": [`rate<${rate * 0.05}`],
  },
};

export function setup() {
  if (targets.length < 4) {
    fail("known and new callers need two functions each: give FUNCTIONS=4 or more");
  }
  warm();
}

export function callKnown() {
  callOwn(exec.scenario.name);
}

// The time for authorization in Server-Timing, in milliseconds.
const authorization = (answer) => Number((/\bauthz;dur=([\d.]+)/.exec(answer.headers["Server-Timing"] || "") || [])[1]);

export function callNew() {
  const caller = callers[exec.scenario.iterationInTest];
  if (!caller) {
    return;
  }
  const url = ownTarget(exec.vu);
  for (const [turn, duration, authz] of [
    ["first", first, firstAuthz],
    ["again", again, againAuthz],
  ]) {
    const id = `cold-${exec.scenario.iterationInTest}-${turn}`;
    const answer = http.post(url, JSON.stringify({ name: id }), call(id, {}, caller.token));
    const right = settle(
      id,
      answer,
      {
        "let in or kept out, as it should be": (r) =>
          caller.status === 200
            ? isOwn(r, url, id)
            : r.status === 403 && field(r, "reason") === "PermissionDenied" && field(r, "dispatched") === "no",
      },
      { caller: caller.status === 200 ? "new" : "stranger" },
    );
    if (right && caller.status === 200) {
      duration.add(answer.timings.duration);
      authz.add(authorization(answer));
    } else if (right) {
      kept.add(1);
    }
  }
}

export function handleSummary(data) {
  return summarize(data, "cold", {
    measured: "http_req_duration{scenario:warm}",
    parts: {
      known_callers_alone: "http_req_duration{scenario:alone}",
      known_callers_meanwhile: "http_req_duration{scenario:warm}",
      first_calls: "first_call_duration",
      second_calls: "again_call_duration",
      first_authorization: "first_call_authorization",
      second_authorization: "again_call_authorization",
    },
    figures: { new_callers: callers.length - strangers, strangers },
  });
}
