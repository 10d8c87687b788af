# shellcheck shell=bash
# Level `api`: a real etcd, API server and controller-manager as plain processes on loopback, without
# a node. Enough for everything that talks to the Kubernetes API, ready in seconds.
# shellcheck source=pki.sh
. "$ROOT/dev/pki.sh"
# shellcheck source=control-plane.sh
. "$ROOT/dev/control-plane.sh"

API_DIR="$STATE/api"
API_KUBECONFIG="$BUILD/api/kubeconfig"

api_healthy() {
  local port
  [[ -s $API_DIR/port && -s $API_KUBECONFIG ]] || return 1
  port=$(<"$API_DIR/port")
  alive "$API_DIR" kube-apiserver && alive "$API_DIR" kube-controller-manager &&
    curl -fsS --max-time 2 --cacert "$API_DIR/pki/ca.crt" "https://127.0.0.1:$port/readyz" >/dev/null 2>&1
}

api_down() {
  local name
  # KILL at once: all state goes with them.
  for name in cert-manager kube-controller-manager kube-apiserver etcd; do
    stop "$API_DIR" "$name" 0
  done
  rm -rf "$API_DIR"
  rm -f "$API_KUBECONFIG"
}

api_up() {
  local DIR=$API_DIR PKI=$API_DIR/pki AUDIT_LOG=$BUILD/api/audit.log ENTER=()
  local port etcd_port peer_port
  api_down
  mkdir -p "$DIR"
  port=$(free_port) etcd_port=$(free_port) peer_port=$(free_port)
  echo "$port" >"$DIR/port"
  pki_ca "$PKI"
  pki_cert "$PKI" apiserver /CN=kube-apiserver serverAuth \
    IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc
  start_etcd "$etcd_port" "$peer_port"
  # Nothing can reach a Service here: the address is from the documentation range, and nothing publishes it.
  start_apiserver "$etcd_port" "$port" --bind-address 127.0.0.1 --advertise-address 192.0.2.1 --endpoint-reconciler-type none
  await_apiserver "$port"
  # Only what an API without nodes needs; the others would make Pods that nobody runs.
  start_controller_manager "https://127.0.0.1:$port" --controllers \
    namespace-controller,deployment-controller,replicaset-controller,garbage-collector-controller,serviceaccount-controller,serviceaccount-token-controller,root-ca-certificate-publisher-controller,clusterrole-aggregation-controller,validatingadmissionpolicy-status-controller
  pki_kubeconfig "$PKI" admin /O=system:masters/CN=kruntimes-dev-admin "https://127.0.0.1:$port" "$API_KUBECONFIG"
  await 60 "the default ServiceAccount" kubectl --kubeconfig "$API_KUBECONFIG" get serviceaccount default
  say "    API server at https://127.0.0.1:$port, KUBECONFIG=$API_KUBECONFIG, audit log $AUDIT_LOG"
}
