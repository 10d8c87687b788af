// What became of calls: judged and counted under the same names by every scenario.
import { check } from "k6";
import { Counter } from "k6/metrics";
import { uidOf } from "./target.js";

export const answered = new Counter("answered_calls");
// 429: the function was running another call.
export const busy = new Counter("busy_calls");
// 503 that says that nothing has run.
export const refused = new Counter("refused_calls");
// Anything that should not have been.
export const failed = new Counter("failed_calls");

// A gateway that is gone fails thousands of calls; a few of each virtual user are told.
const TOLD = 5;
let toldFailures = 0;
let toldRefusals = 0;

// A field of a JSON body; undefined where there is none. k6's own json() throws, and ends the iteration uncounted.
export function field(answer, name) {
  try {
    return answer.json(name);
  } catch {
    return undefined;
  }
}

// Whether the function of that URL answered to this input. Copies made for load tell the UID of their Run too.
export const isOwn = (answer, url, name) =>
  answer.status === 200 && field(answer, "hello") === name && [undefined, uidOf(url)].includes(field(answer, "run"));

// Whether the caller is told that nothing has run, and when to come again.
export const isHarmless = (answer) =>
  [429, 503].includes(answer.status) && field(answer, "dispatched") === "no" && !!answer.headers["Retry-After"];

export const isBusy = (answer) => answer.status === 429 && field(answer, "reason") === "Busy" && isHarmless(answer);

// Checks the answer to the call of that id, counts it, and tells what was wrong. `tags` go to the counter.
export function settle(id, answer, checks, tags = {}) {
  const right = check(answer, {
    ...checks,
    "the invocation id comes back": (r) => r.headers["X-Kruntime-Invocation-Id"] === id,
  });
  if (right) {
    const counter = { 429: busy, 503: refused }[answer.status] || answered;
    counter.add(1, tags);
    if (counter === refused && toldRefusals++ < TOLD) {
      console.info(`${id}: refused, ${field(answer, "reason")}: ${field(answer, "detail")}`);
    }
  } else {
    failed.add(1);
    if (toldFailures++ < TOLD) {
      console.error(`${id}: status ${answer.status}, ${answer.error || String(answer.body).slice(0, 500)}`);
    }
  }
  return right;
}
