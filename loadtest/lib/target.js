// Whom the load goes to and how it identifies itself, read from the environment. loadtest/run.sh checks
// that the variables are there; the CA is verified by k6 itself, through SSL_CERT_FILE.

const url = __ENV.KRUNTIMES_URL || "";
const [, host] = /^https:\/\/([^/:]+)/.exec(url) || [];
if (!host) {
  throw new Error("KRUNTIMES_URL must be the https:// endpoint of a function, as in status.endpoint.url of its Run");
}
if (!__ENV.KRUNTIMES_TOKEN) {
  throw new Error("KRUNTIMES_TOKEN is empty; make one with: kubectl create token hello-caller");
}

// Options that every scenario spreads into its own. The certificate is checked against the name in the URL,
// so an address is mapped to the name instead of being put into the URL.
export const options = {
  hosts: __ENV.KRUNTIMES_ADDRESS ? { [host]: __ENV.KRUNTIMES_ADDRESS } : {},
  summaryTrendStats: ["min", "med", "p(95)", "p(99)", "max"],
};

export const target = url;

// Parameters of one call. The tag keeps the URL, with its UID, out of the metrics.
export function call(invocationId, more = {}) {
  return {
    headers: {
      Authorization: `Bearer ${__ENV.KRUNTIMES_TOKEN}`,
      "Content-Type": "application/json",
      "X-Kruntime-Invocation-ID": invocationId,
    },
    tags: { name: "invoke" },
    timeout: "60s",
    ...more,
  };
}
