# shellcheck shell=bash
# Level `node`: a whole one-node Kubernetes with the real kubelet, containerd and kube-proxy, in one
# network namespace, so that its addresses exist nowhere else and any number of clones can coexist.
# shellcheck source=pki.sh
. "$ROOT/dev/pki.sh"
# shellcheck source=control-plane.sh
. "$ROOT/dev/control-plane.sh"

NODE_DIR="$STATE/node"
NODE_KUBECONFIG="$BUILD/node/kubeconfig"
NODE_IP=10.98.0.2
NODE_PORT=6443
POD_CIDR=10.244.0.0/24
CONTAINERD_SOCKET="$RUN_DIR/containerd.sock"
PAUSE_IMAGE=localhost/kruntimes-pause:1
IN_NETNS=(nsenter "--net=/run/netns/$NETNS")
# The API server's certificate.
NODE_SERVING=(/CN=kube-apiserver serverAuth
  "IP:127.0.0.1,IP:$NODE_IP,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc")

node_healthy() {
  local name
  [[ -s $NODE_KUBECONFIG && -e /run/netns/$NETNS ]] || return 1
  for name in etcd kube-apiserver kube-controller-manager kube-scheduler containerd kubelet kube-proxy; do
    alive "$NODE_DIR" "$name" || return 1
  done
  [[ $(node_condition) == True ]]
}

node_kubectl() { "${IN_NETNS[@]}" kubectl --kubeconfig "$NODE_KUBECONFIG" "$@"; }

node_condition() {
  node_kubectl get node node -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null
}

node_ready() { [[ $(node_condition) == True ]]; }

# === network and cgroups ===

node_network() {
  ip netns add "$NETNS"
  # Both ends stay inside: the kernel may lack `dummy` links, and nothing outside is to be reached.
  "${IN_NETNS[@]}" bash -euc "
    ip link set lo up
    ip link add krt0 type veth peer name krt1
    ip link set krt0 up && ip link set krt1 up
    ip addr add $NODE_IP/24 dev krt0
    ip route add default dev krt0
    echo 1 >/proc/sys/net/ipv4/ip_forward
    # Pod to Service to Pod on the same bridge: answers must pass iptables too.
    [[ ! -e /proc/sys/net/bridge/bridge-nf-call-iptables ]] || echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables"
}

# The cgroup hierarchies of this machine: one folder each on v1, a single one on v2.
cgroup_mounts() { awk '$3 == "cgroup" || $3 == "cgroup2" {print $2}' /proc/mounts; }

# Two kubelets under one cgroup root would end each other's Pods.
node_cgroups() {
  local mount
  for mount in $(cgroup_mounts); do
    mkdir -p "$mount/$CGROUP"
    if [[ -e $mount/$CGROUP/cpuset.cpus && -z $(<"$mount/$CGROUP/cpuset.cpus") ]]; then
      cat "$mount/cpuset.cpus" >"$mount/$CGROUP/cpuset.cpus" || true
      cat "$mount/cpuset.mems" >"$mount/$CGROUP/cpuset.mems" || true
    fi
    # On a node of its own the kubelet gives Pods 1024 shares of each processor beside 1024 for all daemons
    # together. It sets them on `kubepods`, which is one level too low here: without this a burst of one daemon
    # takes half of what all Pods have, and a call waits for tens of milliseconds.
    if [[ -e $mount/$CGROUP/cpu.shares ]]; then
      echo $((1024 * $(nproc))) >"$mount/$CGROUP/cpu.shares"
    elif [[ -e $mount/$CGROUP/cpu.weight ]]; then
      # How kubelet turns shares into a weight.
      echo $((1 + (1024 * $(nproc) - 2) * 9999 / 262142)) >"$mount/$CGROUP/cpu.weight"
    fi
  done
}

# === containerd, kubelet, kube-proxy ===

start_containerd() {
  mkdir -p "$RUN_DIR" "$NODE_DIR/cni/conf" "$NODE_DIR/containerd"
  # Images in memory (about 1 GB): unpacking and, above all, removing thousands of files is slow on disks.
  mount -t tmpfs -o mode=711 containerd "$NODE_DIR/containerd"
  cat >"$NODE_DIR/cni/conf/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "kruntimes", "plugins": [{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "$NODE_DIR/cni/data",
           "ranges": [[{"subnet": "$POD_CIDR"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  # restrict_oom_score_adj: without CAP_SYS_RESOURCE (containers, CI) nothing may lower it.
  cat >"$NODE_DIR/containerd.toml" <<TOML
version = 2
root = "$NODE_DIR/containerd"
state = "$RUN_DIR/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs", "io.containerd.internal.v1.opt",
  "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "$CONTAINERD_SOCKET"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "$PAUSE_IMAGE"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$NODE_DIR/cni/conf"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "$RUN_DIR/runc"
TOML
  start "$NODE_DIR" containerd "${IN_NETNS[@]}" containerd --config "$NODE_DIR/containerd.toml" --log-level warn
  await 30 "containerd" ctr --address "$CONTAINERD_SOCKET" version
  ctr --address "$CONTAINERD_SOCKET" -n k8s.io images import "$("$ROOT/dev/images/build" pause)" >/dev/null
}

kubelet_config() {
  # Evictions and image clean-up are off: the disk is shared with everything else on the machine.
  cat <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP
oomScoreAdj: 0
podLogsDir: $NODE_DIR/pod-logs
volumePluginDir: $NODE_DIR/volume-plugins
containerRuntimeEndpoint: unix://$CONTAINERD_SOCKET
resolvConf: $NODE_DIR/resolv.conf
authentication:
  anonymous: {enabled: false}
  x509: {clientCAFile: $PKI/ca.crt}
  webhook: {enabled: true}
authorization: {mode: Webhook}
tlsCertFile: $PKI/kubelet-server.crt
tlsPrivateKeyFile: $PKI/kubelet-server.key
syncFrequency: 10s
# Tests end processes again and again: what was ended starts again soon.
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%"}
enableServer: true
readOnlyPort: 0
maxPods: 100
registerWithTaints: []
YAML
}

start_kubelet() {
  pki_cert "$PKI" kubelet-server /CN=node serverAuth "IP:$NODE_IP,DNS:node"
  pki_kubeconfig "$PKI" kubelet /O=system:nodes/CN=system:node:node "$SERVER" "$DIR/kubelet.kubeconfig"
  # No name server: cluster addresses come from the environment and from endpoints.
  echo "# none" >"$DIR/resolv.conf"
  kubelet_config >"$DIR/kubelet.yaml"
  start "$DIR" kubelet "${ENTER[@]}" "$KUBE_BIN/kubelet" --config "$DIR/kubelet.yaml" \
    --kubeconfig "$DIR/kubelet.kubeconfig" --root-dir "$DIR/kubelet" --hostname-override node \
    --node-ip "$NODE_IP" --cert-dir "$PKI"
}

start_kube_proxy() {
  pki_kubeconfig "$PKI" kube-proxy /CN=system:kube-proxy "$SERVER" "$DIR/kube-proxy.kubeconfig"
  # iptables: Debian 12's nft does not parse what the nftables mode sends. Conntrack limits belong to the host.
  start "$DIR" kube-proxy "${ENTER[@]}" "$KUBE_BIN/kube-proxy" --kubeconfig "$DIR/kube-proxy.kubeconfig" \
    --hostname-override node --proxy-mode iptables --cluster-cidr "$POD_CIDR" --oom-score-adj 0 \
    --conntrack-max-per-core 0 --conntrack-min 0 \
    --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 0
}

# === up ===

node_up() {
  local DIR=$NODE_DIR PKI=$NODE_DIR/pki AUDIT_LOG=$BUILD/node/audit.log
  local ENTER=("${IN_NETNS[@]}") SERVER=https://127.0.0.1:$NODE_PORT
  node_down
  mkdir -p "$DIR"
  node_network
  node_cgroups
  pki_ca "$PKI"
  pki_cert "$PKI" apiserver "${NODE_SERVING[@]}"
  pki_cert "$PKI" kubelet-client /O=system:masters/CN=kube-apiserver clientAuth
  start_etcd 2379 2380
  node_apiserver start_apiserver 2379 "$NODE_PORT"
  echo "$NODE_PORT" >"$DIR/apiserver.port"
  start_containerd
  await_apiserver "$NODE_PORT"
  pki_kubeconfig "$PKI" admin /O=system:masters/CN=kruntimes-dev-admin "$SERVER" "$NODE_KUBECONFIG"
  start_controller_manager "$SERVER"
  pki_kubeconfig "$PKI" scheduler /CN=system:kube-scheduler "$SERVER" "$DIR/scheduler.kubeconfig"
  start "$DIR" kube-scheduler "${ENTER[@]}" "$KUBE_BIN/kube-scheduler" --kubeconfig "$DIR/scheduler.kubeconfig" \
    --leader-elect=false --secure-port 0 --profiling=false
  start_kubelet
  start_kube_proxy
  if ! (await 90 "the node" node_ready); then
    tail -n 15 "$DIR/kubelet.log" "$DIR/containerd.log" >&2
    die "the node does not become Ready"
  fi
  await 60 "the default ServiceAccount" node_kubectl get serviceaccount default
  say "    node Ready; commands run in it by dev/in, KUBECONFIG=$NODE_KUBECONFIG, audit log $AUDIT_LOG"
}

# === another CA ===

# rotate publish-both|serve|publish-new: the steps by which the API server's certificate comes from another CA, the
# other one of the two that pki_ca made.
node_rotate() {
  local DIR=$NODE_DIR PKI=$NODE_DIR/pki old=ca new=next-ca
  openssl verify -CAfile "$NODE_DIR/pki/ca.crt" "$NODE_DIR/pki/apiserver.crt" >/dev/null 2>&1 || { old=next-ca && new=ca; }
  case $1 in
    publish-both) node_publish_roots "$PKI/$old.crt" "$PKI/$new.crt" ;;
    serve)
      pki_cert "$PKI" apiserver "${NODE_SERVING[@]}" "$new"
      node_replace_apiserver
      ;;
    # What is called new above has become the old one by now.
    publish-new) node_publish_roots "$PKI/$old.crt" ;;
  esac
}

# Another API server takes over, as where there are several: it is ready before the old one ends, whose connections end
# with it, and whose TLS sessions nobody else can resume.
node_replace_apiserver() {
  local AUDIT_LOG=$BUILD/node/audit.log ENTER=("${IN_NETNS[@]}") from to chain
  from=$(<"$DIR/apiserver.port")
  to=$((from + 1))
  node_apiserver run_apiserver kube-apiserver-next 2379 "$to"
  await 120 "the new API server" apiserver_ready "$to"
  # Its addresses stay what they were: that of the kubeconfigs, and that of Pods.
  for chain in OUTPUT PREROUTING; do
    "${ENTER[@]}" iptables -t nat -I "$chain" -p tcp -d 127.0.0.1 --dport "$NODE_PORT:$from" -j REDIRECT --to-ports "$to"
    "${ENTER[@]}" iptables -t nat -I "$chain" -p tcp -d 10.96.0.1 --dport 443 -j DNAT --to-destination "$NODE_IP:$to"
  done
  # Not in peace: it would take the address away that both have.
  stop "$DIR" kube-apiserver 0
  mv "$DIR/kube-apiserver-next.pid" "$DIR/kube-apiserver.pid"
  echo "$to" >"$DIR/apiserver.port"
}

# node_apiserver CMD...: CMD with what API servers of this level have in common.
node_apiserver() {
  "$@" --advertise-address "$NODE_IP" --kubelet-preferred-address-types InternalIP \
    --kubelet-client-certificate "$PKI/kubelet-client.crt" --kubelet-client-key "$PKI/kubelet-client.key"
}

# node_publish_roots FILE...: the CAs that Pods trust; returns once every Pod has them.
node_publish_roots() {
  local DIR=$NODE_DIR PKI=$NODE_DIR/pki
  local ENTER=("${IN_NETNS[@]}") SERVER=https://127.0.0.1:$NODE_PORT
  cat "$@" >"$PKI/root-ca.crt"
  stop "$DIR" kube-controller-manager
  start_controller_manager "$SERVER"
  await 180 "all Pods to have the roots" roots_arrived
}

roots_arrived() {
  local file
  for file in "$NODE_DIR"/kubelet/pods/*/volumes/kubernetes.io~projected/*/ca.crt; do
    [[ ! -e $file ]] || cmp -s "$file" "$NODE_DIR/pki/root-ca.crt" || return 1
  done
}

# === down ===

# Everything below our cgroup is a process of a Pod of this cluster.
kill_cgroups() {
  local mount file pids i
  for ((i = 0; i < 50; i++)); do
    pids=$(for mount in $(cgroup_mounts); do
      [[ -d $mount/$CGROUP ]] || continue
      find "$mount/$CGROUP" -name cgroup.procs -exec cat {} + 2>/dev/null || true
    done | sort -un)
    [[ -n $pids ]] || break
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null || true
    sleep 0.1
  done
  for mount in $(cgroup_mounts); do
    [[ -d $mount/$CGROUP ]] || continue
    find "$mount/$CGROUP" -depth -type d -exec rmdir {} \; 2>/dev/null || true
  done
}

# Shims and whatever else was started in our network namespace.
kill_netns() {
  local pids i
  for ((i = 0; i < 50; i++)); do
    pids=$(ip netns pids "$NETNS" 2>/dev/null || true)
    [[ -n $pids ]] || break
    # shellcheck disable=SC2086
    kill "$( ((i < 10)) && echo -TERM || echo -KILL)" $pids 2>/dev/null || true
    sleep 0.1
  done
}

unmount_below() {
  local mount
  # Deepest first; a lazy unmount only where a plain one is refused.
  awk -v at="$1/" 'index($2, at) == 1 {print $2}' /proc/mounts | sort -r | while read -r mount; do
    umount "$mount" 2>/dev/null || umount -l "$mount" 2>/dev/null || true
  done
}

node_down() {
  local name link sandbox
  # KILL at once: all state goes with them. kubelet first, or it starts again what ends.
  for name in kubelet cert-manager kube-proxy kube-scheduler kube-controller-manager kube-apiserver kube-apiserver-next etcd; do
    stop "$NODE_DIR" "$name" 0
  done
  kill_cgroups
  stop "$NODE_DIR" containerd 0
  if [[ -e /run/netns/$NETNS ]]; then
    kill_netns
  fi
  kill_cgroups
  unmount_below "$NODE_DIR"
  unmount_below "$RUN_DIR"
  if [[ -e /run/netns/$NETNS ]]; then
    ip netns delete "$NETNS"
  fi
  # What a Pod's network set-up left in a folder shared by the machine; the file's name holds the sandbox's id.
  for sandbox in "$NODE_DIR"/containerd/io.containerd.grpc.v1.cri/sandboxes/*/; do
    rm -f /var/lib/cni/results/*-"$(basename "$sandbox")"-*
  done
  # The kubelet links every container's log here, whatever podLogsDir says.
  for link in /var/log/containers/*; do
    if [[ -L $link && $(readlink "$link") == "$NODE_DIR"/* ]]; then rm -f "$link"; fi
  done
  rm -rf "$NODE_DIR" "$RUN_DIR"
  rm -f "$NODE_KUBECONFIG"
}
