# shellcheck shell=bash
# What dev/load does to the installation while the load goes on: replaces gateways and Pods of a Runtime, and changes
# certificates. Each function returns once what it did has arrived everywhere.

GATEWAYS=app.kubernetes.io/name=kruntimes-gateway

in_system() { TARGET_NAMESPACE=kruntimes-system "$@"; }
system() { in_system kube "$@"; }

# === rollout ===

replace_gateways() {
  system rollout restart deployment kruntimes-gateway >/dev/null
  system rollout status deployment kruntimes-gateway --timeout 300s >/dev/null
  await 340 "the old gateways to end" old_gateways_are_gone
}

old_gateways_are_gone() { [[ -z $(in_system leaving_pods "$GATEWAYS") ]]; }

# Whatever changes the template of a Runtime replaces its Pods.
replace_pool() {
  local before
  before=$(kube get pods -l runtime=python -o name)
  kube patch runtime python --type merge \
    --patch "{\"spec\": {\"template\": {\"metadata\": {\"annotations\": {\"loadtest/round\": \"$(now_ms)\"}}}}}" >/dev/null
  await 600 "the Pods of Runtime python to be replaced" pool_is_settled
  functions_are_ready
  # A word of a name that stands in both lists.
  [[ -z $(comm -12 <(sort <<<"$before") <(kube get pods -l runtime=python -o name | sort)) ]] || die "a Pod of before is still there"
}

# === certificates ===

certificate_of() { system get secret "$1" -o 'jsonpath={.data.tls\.crt}' | base64 -d; }

# end_of SECRET: when its certificate ends, seconds since the epoch.
end_of() { date -d "$(certificate_of "$1" | openssl x509 -noout -enddate | cut -d= -f2)" +%s; }

# gateways_use METRIC SECRET BEFORE: the Secret has another certificate than the one that ended at BEFORE, and every gateway
# says that it is in use.
gateways_use() {
  local end pod
  end=$(end_of "$2") && [[ $end != "$3" ]] || return 1
  for pod in $(system get pods -l "$GATEWAYS" -o 'jsonpath={.items[*].metadata.name}'); do
    system get --raw "/api/v1/namespaces/kruntimes-system/pods/$pod:9090/proxy/metrics" |
      awk -v name="kruntimes_gateway_$1_not_after_seconds" -v end="$end" '$1 == name && $2 == end {found = 1} END {exit !found}' || return 1
  done
}

# The serving certificate, by what `cmctl renew` does.
renew_serving() {
  local before
  before=$(end_of kruntimes-gateway-tls)
  system get certificate kruntimes-gateway -o json | jq '.status.conditions |= map(select(.type != "Issuing"))
    | .status.conditions += [{type: "Issuing", status: "True",
    reason: "ManuallyTriggered", message: "renewed under load", lastTransitionTime: (now | todate)}]' |
    "$ROOT/dev/in" kubectl replace --subresource status -f - >/dev/null
  await 240 "every gateway to use the renewed certificate" gateways_use certificate kruntimes-gateway-tls "$before"
}

# The CA of the hop, which the scheduler replaces by itself in the last third of its life: so it is given one that comes
# into that third within a minute. What the scheduler leaves 10 minutes for is waited for here.
rotate_peer() {
  local dir=$WORK/peer since before
  mkdir "$dir"
  age_peer_ca "$dir"
  await 180 "the scheduler to make another CA of the hop" ca_is_another "$dir/aged.crt"
  # Half a minute after the aged one, which may have been published with one before it too.
  since=$(system get secret kruntimes-peer-ca -o 'jsonpath={.metadata.annotations.kruntimes\.io/made-at}')
  await 180 "every Pod of a Runtime to trust both CAs" pods_trust_both "$since"
  # The gateways' own certificate would change at its own renewal.
  before=$(end_of kruntimes-gateway-peer)
  system delete secret kruntimes-gateway-peer >/dev/null
  await 240 "every gateway to use a certificate of the other CA" gateways_use peer_certificate kruntimes-gateway-peer "$before"
  certificate_of kruntimes-peer-ca >"$dir/next.crt"
  certificate_of kruntimes-gateway-peer | openssl verify -CAfile "$dir/next.crt" >/dev/null || die "the other CA has not signed it"
}

# age_peer_ca DIR: the same CA, by name and key, with less of its life left. `openssl ca` takes an end to the second.
age_peer_ca() {
  local end
  # A third of a year, and longer than the scheduler rests between two looks (30 s): it must see it before.
  end=$(date -u -d "+$((365 * 86400 / 3 + 40)) seconds" +%Y%m%d%H%M%SZ)
  certificate_of kruntimes-peer-ca >"$1/ca.crt"
  (umask 077 && system get secret kruntimes-peer-ca -o 'jsonpath={.data.tls\.key}' | base64 -d >"$1/ca.key")
  openssl x509 -x509toreq -in "$1/ca.crt" -signkey "$1/ca.key" -out "$1/ca.csr" 2>/dev/null
  : >"$1/index.txt"
  cat >"$1/ca.conf" <<CONF
[ca]
default_ca = same
[same]
database = $1/index.txt
new_certs_dir = $1
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = optional
[extensions]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
CONF
  openssl ca -batch -selfsign -preserveDN -notext -config "$1/ca.conf" -keyfile "$1/ca.key" -in "$1/ca.csr" -out "$1/aged.crt" -enddate "$end" 2>"$1/ca.log" ||
    { cat "$1/ca.log" >&2 && die "openssl cannot sign the CA again"; }
  system patch secret kruntimes-peer-ca --patch "{\"data\": {\"tls.crt\": \"$(base64 -w0 "$1/aged.crt")\"}}" >/dev/null
}

# ca_is_another FILE: the CA is neither the one of FILE nor without the one before.
ca_is_another() {
  [[ -n $(system get secret kruntimes-peer-ca -o 'jsonpath={.data.previous\.crt}') ]] && ! cmp -s <(certificate_of kruntimes-peer-ca) "$1"
}

# pods_trust_both SINCE: every runtimed has said so since then.
pods_trust_both() {
  local namespace name
  while read -r namespace name; do
    TARGET_NAMESPACE=$namespace kube logs "$name" -c runtimed --since-time "$1" </dev/null |
      grep '"the peer CA of gateways is in use"' | grep -q '"certificates":2' || return 1
  done < <(kube get pods --all-namespaces -l runtime --field-selector status.phase=Running -o json | jq -r '.items[].metadata | [.namespace, .name] | @tsv')
}

# The CA of the API server itself.
rotate_api() {
  "$ROOT/dev/rotate-ca" publish-both
  # Daemons may go by CAs that are so old; nothing tells when they have read them again.
  sleep 61
  "$ROOT/dev/rotate-ca" serve
  "$ROOT/dev/rotate-ca" publish-new
}
