# shellcheck shell=bash
# How a caller reaches the demo's function: its URL, the address behind the name, the CA, a token.

TARGET_NAMESPACE=kruntimes-demo

kube() { "$ROOT/dev/in" kubectl -n "$TARGET_NAMESPACE" "$@"; }

# find_target RUN DIR [ACCOUNT]: fills DIR (which must be private) with url, host, address (host:port behind the name),
# ca.crt and the token of the ServiceAccount; RUN-caller comes with the example.
find_target() {
  local run=$1 dir=$2 account=${3:-$1-caller} host
  kube get run "$run" -o 'jsonpath={.status.endpoint.url}' >"$dir/url"
  kube get run "$run" -o 'jsonpath={.status.endpoint.caBundle}' | base64 -d >"$dir/ca.crt"
  [[ -s $dir/url ]] || die "Run $run has no endpoint; is it Ready?  dev/in kubectl -n $TARGET_NAMESPACE get run $run"
  host=$(<"$dir/url")
  host=${host#https://}
  host=${host%%/*}
  echo "${host%%:*}" >"$dir/host"
  if [[ -n ${KUBECONFIG_EXTERNAL:-} ]]; then
    # A Service address is reachable on the cluster's nodes only.
    start "$dir" forward kubectl --kubeconfig "$KUBECONFIG_EXTERNAL" -n kruntimes-system port-forward service/kruntimes-gateway :443
    await 20 "kubectl port-forward" grep -q 'Forwarding from 127' "$dir/forward.log"
    sed -n 's/^Forwarding from \(127.0.0.1:[0-9]*\) .*/\1/p' "$dir/forward.log" >"$dir/address"
  else
    echo "$(kube -n kruntimes-system get service kruntimes-gateway -o 'jsonpath={.spec.clusterIP}'):443" >"$dir/address"
  fi
  kube create token "$account" --duration 1h >"$dir/token"
}

# forget_target DIR: ends what find_target started, and removes DIR with the token.
forget_target() {
  stop "$1" forward
  rm -rf "$1"
}
