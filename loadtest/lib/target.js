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
  summaryTrendStats: ["min", "med", "p(95)", "p(99)", "max"],
};

export const target = targets[0];

// Parameters of one call. The tag keeps the URL, with its UID, out of the metrics.
export function call(invocationId, more = {}) {
  return {
    headers: {
      Authorization: `Bearer ${token}`,
      "Content-Type": "application/json",
      "X-Kruntime-Invocation-ID": invocationId,
    },
    tags: { name: "invoke" },
    timeout: "60s",
    ...more,
  };
}
