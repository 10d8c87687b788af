// Calls at a constant rate, whatever the answers take (an open model), over all functions of KRUNTIMES_URL. Each virtual
// user has a function of its own, because a function runs one call at a time; a call that finds none of them free
// counts as dropped.
import http from "k6/http";
import { fail } from "k6";
import exec from "k6/execution";
import { call, number, ownTarget, seconds, targets } from "./target.js";
import { isOwn, settle } from "./outcome.js";

export const rate = number("KRUNTIMES_RATE", 50);

// A scenario of k6 that goes on for `usual`, unless KRUNTIMES_DURATION says otherwise.
export const pace = (usual) => ({
  executor: "constant-arrival-rate",
  rate,
  timeUnit: "1s",
  duration: `${seconds("KRUNTIMES_DURATION", usual)}s`,
  preAllocatedVUs: targets.length,
  maxVUs: targets.length,
});

// Every function answers before the clock starts: its process and the access review are warm.
export function warm() {
  const wanted = __ENV.KRUNTIMES_HTTP === "1.1" ? "HTTP/1.1" : "HTTP/2.0";
  for (const [at, url] of targets.entries()) {
    const answer = http.post(url, JSON.stringify({ name: "warm" }), call(`warm-${at}`));
    if (answer.status !== 200) {
      fail(`${url} is not ready for load: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
    }
    if (answer.proto !== wanted) {
      fail(`the gateway was to be called over ${wanted} and is called over ${answer.proto}: KRUNTIMES_HTTP=1.1 wants GODEBUG=http2client=0`);
    }
  }
}

// One call of the virtual user's own function, answered to its own input. `allowed` says which other answers are right.
export function callOwn(scenario, allowed = () => false) {
  const id = `${scenario}-${exec.vu.idInTest}-${exec.vu.iterationInScenario}`;
  const url = ownTarget(exec.vu);
  const answer = http.post(url, JSON.stringify({ name: id }), call(id));
  settle(id, answer, { "answered to its own input, or as it may be": (r) => isOwn(r, url, id) || allowed(r) });
}
