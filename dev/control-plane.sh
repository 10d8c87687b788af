# shellcheck shell=bash
# etcd, API server and controller-manager: what both levels of development cluster share. The caller
# sets DIR (state folder of the level), PKI, AUDIT_LOG, and ENTER (a command prefix that enters the
# level's network namespace; empty on the host).

audit_policy() {
  # Every request of a client, once, when it is answered; health checks and the cluster's own leases would
  # drown them.
  cat <<'YAML'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, nonResourceURLs: ["/healthz*", "/livez*", "/readyz*", "/version", "/openapi*"]}
- {level: None, namespaces: [kube-node-lease], resources: [{group: coordination.k8s.io}]}
- {level: None, users: ["system:apiserver"]}
- {level: Metadata}
YAML
}

# start_etcd CLIENT_PORT PEER_PORT
start_etcd() {
  # No fsync: the data need not survive the machine, and a laptop's disk is slow.
  start "$DIR" etcd "${ENTER[@]}" etcd --data-dir "$DIR/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls "http://127.0.0.1:$1" --advertise-client-urls "http://127.0.0.1:$1" \
    --listen-peer-urls "http://127.0.0.1:$2" --initial-advertise-peer-urls "http://127.0.0.1:$2" \
    --initial-cluster "default=http://127.0.0.1:$2"
}

# start_apiserver ETCD_PORT PORT FLAG...
start_apiserver() {
  mkdir -p "$(dirname "$AUDIT_LOG")"
  rm -f "$AUDIT_LOG"
  run_apiserver kube-apiserver "$@"
}

# run_apiserver NAME ETCD_PORT PORT FLAG...: goes on with the audit log that is there.
run_apiserver() {
  local name=$1 etcd_port=$2 port=$3
  shift 3
  audit_policy >"$DIR/audit-policy.yaml"
  start "$DIR" "$name" "${ENTER[@]}" "$KUBE_BIN/kube-apiserver" \
    --etcd-servers "http://127.0.0.1:$etcd_port" --secure-port "$port" \
    --tls-cert-file "$PKI/apiserver.crt" --tls-private-key-file "$PKI/apiserver.key" \
    --client-ca-file "$PKI/ca.crt" --authorization-mode Node,RBAC --allow-privileged \
    --service-account-issuer https://kubernetes.default.svc.cluster.local \
    --service-account-signing-key-file "$PKI/sa.key" --service-account-key-file "$PKI/sa.pub" \
    --service-cluster-ip-range 10.96.0.0/16 --profiling=false \
    --audit-policy-file "$DIR/audit-policy.yaml" --audit-log-path "$AUDIT_LOG" --audit-log-maxsize 2000 "$@"
}

# start_controller_manager SERVER FLAG...
start_controller_manager() {
  local server=$1
  shift
  pki_kubeconfig "$PKI" controller-manager /CN=system:kube-controller-manager "$server" "$DIR/controller-manager.kubeconfig"
  start "$DIR" kube-controller-manager "${ENTER[@]}" "$KUBE_BIN/kube-controller-manager" \
    --kubeconfig "$DIR/controller-manager.kubeconfig" --leader-elect=false --secure-port 0 --profiling=false \
    --use-service-account-credentials --service-account-private-key-file "$PKI/sa.key" --root-ca-file "$PKI/root-ca.crt" \
    --cluster-signing-cert-file "$PKI/ca.crt" --cluster-signing-key-file "$PKI/ca.key" "$@"
}

# apiserver_ready PORT
apiserver_ready() {
  "${ENTER[@]}" curl -fsS --max-time 2 --cacert <(cat "$PKI/ca.crt" "$PKI/next-ca.crt") "https://127.0.0.1:$1/readyz"
}

# await_apiserver PORT: fails at once, with the log's end, when the process is gone.
await_apiserver() {
  local deadline=$((SECONDS + 120))
  until apiserver_ready "$1" >/dev/null 2>&1; do
    if ! alive "$DIR" kube-apiserver || ! alive "$DIR" etcd || ((SECONDS > deadline)); then
      tail -n 15 "$DIR/kube-apiserver.log" "$DIR/etcd.log" >&2
      die "the API server does not answer"
    fi
    sleep 0.2
  done
}
