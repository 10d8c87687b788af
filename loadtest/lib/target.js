// Whom the load goes to and how it identifies itself, read from the environment. loadtest/run.sh checks
// that the variables are there; the CA is verified by k6 itself, through SSL_CERT_FILE.

// One function, or several separated by spaces.
export const targets = (__ENV.KRUNTIMES_URL || "").split(/\s+/).filter((url) => url);
const hosts = targets.map((url) => (/^https:\/\/([^/:]+)/.exec(url) || [])[1]);
if (targets.length === 0 || hosts.some((host) => host !== hosts[0] || !host)) {
  throw new Error("KRUNTIMES_URL must be https:// endpoints of functions behind one gateway, as in status.endpoint.url of Runs");
}
if (!__ENV.KRUNTIMES_TOKEN_FILE) {
  throw new Error("KRUNTIMES_TOKEN_FILE is empty; make one with: kubectl create token hello-caller >FILE");
}
// A file, because the environment of a process is easily seen, and Kubernetes mounts tokens as files.
const token = open(__ENV.KRUNTIMES_TOKEN_FILE).trim();

// Options that every scenario spreads into its own. The certificate is checked against the name in the URL,
// so an address is mapped to the name instead of being put into the URL.
export const options = {
  hosts: __ENV.KRUNTIMES_ADDRESS ? { [hosts[0]]: __ENV.KRUNTIMES_ADDRESS } : {},
  noConnectionReuse: choice("KRUNTIMES_CONNECTIONS", ["kept", "new"]) === "new",
  summaryTrendStats: ["min", "med", "p(95)", "p(99)", "max"],
};

export const target = targets[0];

// The function of this virtual user alone, as a function runs one call at a time. Numbers of users are those of the
// whole test, whichever of its scenarios they are in.
export const ownTarget = (vu) => targets[(vu.idInTest - 1) % targets.length];

// The UID of the Run that an endpoint belongs to.
export const uidOf = (url) => (/([^/]+):invoke$/.exec(url) || [])[1];

// Parameters of one call. The tag keeps the URL, with its UID, out of the metrics.
export function call(invocationId, more = {}, bearer = token) {
  return {
    headers: {
      Authorization: `Bearer ${bearer}`,
      "Content-Type": "application/json",
      "X-Kruntime-Invocation-ID": invocationId,
    },
    tags: { name: "invoke" },
    timeout: "60s",
    ...more,
  };
}

// === settings ===

export function number(name, usual) {
  const value = Number(__ENV[name] || usual);
  if (!(value > 0)) {
    throw new Error(`${name} must be a number above 0`);
  }
  return value;
}

// Seconds of a duration such as 90s or 2m30s.
export function seconds(name, usual) {
  const text = __ENV[name] || usual;
  const [, minutes, rest] = /^(?:(\d+)m)?(?:(\d+)s)?$/.exec(text) || [];
  const value = Number(minutes || 0) * 60 + Number(rest || 0);
  if (!(value > 0)) {
    throw new Error(`${name} must be a duration such as 90s or 2m30s`);
  }
  return value;
}

// One of these words; the first unless another is asked for.
export function choice(name, words) {
  const word = __ENV[name] || words[0];
  if (!words.includes(word)) {
    throw new Error(`${name} must be one of: ${words.join(", ")}`);
  }
  return word;
}
