#!/usr/bin/env bash
# Tests the charts by rendering them; needs helm on PATH, no cluster. Every refusal must name the value.
# e2e/tests/api_charts.rs shows what is rendered to an API server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

command -v helm >/dev/null || { echo "charts/test.sh: helm is not on PATH; run make tools" >&2 && exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failures=0
fail() { failures=$((failures + 1)) && echo "charts/test.sh: $*" >&2; }

# render CHART FLAGS...: with a certificate source, which the chart kruntimes cannot do without.
render() {
  local chart=$1
  shift
  [[ $chart != kruntimes ]] || set -- --set gateway.tls.existingSecret=cert "$@"
  helm template t "$chart" --namespace kruntimes-system "$@" 2>&1
}

# shows TEXT CHART FLAGS...: what is rendered has this line. hides: no line has it.
shows() {
  local out
  out=$(render "${@:2}") || fail "cannot be rendered: ${*:2}: $out"
  grep -qF -- "$1" <<<"$out" || fail "'$1' is missing with ${*:2}"
}
hides() {
  local out
  out=$(render "${@:2}") || fail "cannot be rendered: ${*:2}: $out"
  ! grep -qF -- "$1" <<<"$out" || fail "'$1' is there with ${*:2}"
}
# count N TEXT CHART FLAGS...
count() {
  local n
  n=$(render "${@:3}" | grep -cF -- "$2") || true
  [[ $n == "$1" ]] || fail "'$2' is there $n times, not $1, with ${*:3}"
}

# document KIND NAME CHART FLAGS...: one object of what is rendered.
document() {
  local kind=$1 name=$2
  render "${@:3}" | awk -v RS='(^|\n)---\n' -v kind="kind: $kind" -v name="  name: $name\n" \
    'index("\n" $0 "\n", "\n" kind "\n") && index($0 "\n", name) {print}'
}

# refuses TEXT CHART FLAGS...: not rendered, and the message has the text.
refuses() {
  local out
  if out=$(helm template t "${@:2}" 2>&1); then
    fail "accepted, although '$1' was expected: ${*:2}"
  elif ! grep -qF -- "$1" <<<"$out"; then
    fail "'$1' is not in the refusal of ${*:2}: $out"
  fi
}

# === every set of values renders, and lint has nothing to say ===
for chart in kruntimes kruntimes-runtimes; do
  for values in "$chart"/ci/*.yaml; do
    helm lint --quiet "$chart" -f "$values" || fail "helm lint $chart -f $values"
    helm template t "$chart" -n kruntimes-system -f "$values" >"$tmp/$chart-$(basename "$values")" || fail "helm template $chart -f $values"
  done
done

# === refusals name the value and the remedy ===
refuses "Set gateway.tls.existingSecret" kruntimes
refuses "gateway.tls.certManager.enabled=true" kruntimes
refuses "existingSecret and certManager.enabled exclude each other" kruntimes --set gateway.tls.existingSecret=a,gateway.tls.certManager.enabled=true
refuses "'replica'" kruntimes --set gateway.replica=2
refuses "/gateway/tls/certManager" kruntimes --set gateway.tls.certManager.issuer=x
refuses "/gateway/replicas" kruntimes --set gateway.replicas=-1
refuses "/scheduler/replicas" kruntimes --set scheduler.replicas=many
refuses "/scope/namespaces/1" kruntimes --set 'scope.namespaces={a,Team_B}'
refuses "/scope/namespaces" kruntimes --set scope.namespaces=a
refuses "/gateway/tls/minVersion" kruntimes --set-string gateway.tls.minVersion=1.1
refuses "/gateway/url" kruntimes --set gateway.url=http://functions.example.com
refuses "/gateway/authorization/ttlSeconds" kruntimes --set gateway.authorization.ttlSeconds=31
refuses "/gateway/callerCredential" kruntimes --set gateway.callerCredential=maybe
refuses "/gateway/extraArgs/0" kruntimes --set 'gateway.extraArgs={threads=4}'
refuses "/images/pullPolicy" kruntimes --set images.pullPolicy=Sometimes
refuses "gateway.timeouts.defaultSeconds (60) must not be above" kruntimes --set gateway.tls.existingSecret=a,gateway.timeouts.defaultSeconds=60,gateway.timeouts.maxSeconds=30
refuses "gateway.limits.inFlightPerNamespace (9) must not be above" kruntimes --set gateway.tls.existingSecret=a,gateway.limits.inFlightPerNamespace=9,gateway.limits.inFlight=8
refuses "/gateway/image" kruntimes --set gateway.image=gw@sha256:abc
refuses "/tracing/otlpEndpoint" kruntimes --set tracing.otlpEndpoint=collector:4317
refuses "/tracing/otlpEndpoint" kruntimes --set tracing.otlpEndpoint=http://collector:4318/v1/traces
refuses "/tracing/sampler" kruntimes --set tracing.sampler=always_on
refuses "/tracing/samplerArg" kruntimes --set-string tracing.samplerArg=2
refuses "/gateway/networkPolicy/from/0" kruntimes --set 'gateway.networkPolicy.from[0].podselector.matchLabels.a=b'
refuses "/gateway/extraEnv/0/name" kruntimes --set 'gateway.extraEnv[0].name=a-b'
refuses "/metrics/podMonitor/interval" kruntimes --set metrics.podMonitor.interval=30
refuses "/gateway/resources/limits/memory" kruntimes --set gateway.resources.limits.memory=much
refuses "gateway.autoscaling.minReplicas (4) must not be above" kruntimes --set gateway.tls.existingSecret=a,gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=4,gateway.autoscaling.maxReplicas=3
refuses "scheduler.extraEnv: A is there twice" kruntimes --set 'gateway.tls.existingSecret=a,scheduler.extraEnv[0].name=A,scheduler.extraEnv[1].name=A'
refuses "/test/gatewayAddress" kruntimes-runtimes --set test.gatewayAddress=10.96.0.7
refuses "'pyton'" kruntimes-runtimes --set runtimes.pyton.enabled=true
refuses "/runtimes/python/replicas" kruntimes-runtimes --set runtimes.python.replicas=-1
refuses "/runtimes/python/capacity/memory" kruntimes-runtimes --set runtimes.python.capacity.memory=much
refuses "/runtimes/python/invocation/onCallerGone" kruntimes-runtimes --set runtimes.python.invocation.onCallerGone=Stop

# === an explicit false or 0 is rendered as given ===
gateway=(kruntimes --show-only templates/gateway.yaml)
count 1 "replicas: 0" "${gateway[@]}" --set gateway.replicas=0
shows "replicas: 0" kruntimes --show-only templates/scheduler.yaml --set scheduler.replicas=0
shows "--authorization-ttl=0s" "${gateway[@]}" --set gateway.authorization.ttlSeconds=0
shows "--authorization-opaque-ttl=0s" "${gateway[@]}" --set gateway.authorization.opaqueTtlSeconds=0
shows "terminationGracePeriodSeconds: 0" "${gateway[@]}" --set gateway.terminationGracePeriodSeconds=0
shows "maxUnavailable: 0%" "${gateway[@]}" --set-string gateway.podDisruptionBudget.maxUnavailable=0%
count 2 "maxUnavailable: 0" "${gateway[@]}" --set gateway.podDisruptionBudget.maxUnavailable=0
hides "PodDisruptionBudget" "${gateway[@]}" --set gateway.podDisruptionBudget.enabled=false
hides "topologySpreadConstraints" "${gateway[@]}" --set-json 'gateway.topologySpreadConstraints=[]'
hides "CustomResourceDefinition" kruntimes --set crds.enabled=false
hides "helm.sh/resource-policy" kruntimes --set crds.keep=false
hides "aggregate-to" kruntimes --set rbac.aggregateToUserRoles=false
hides "kind: NetworkPolicy" kruntimes --set gateway.networkPolicy.enabled=false
hides "name: kruntimes-gateway" kruntimes --set gateway.enabled=false --set crds.enabled=false
hides "cert-manager.io" kruntimes --set gateway.tls.certManager.enabled=false
helm template t kruntimes --set gateway.enabled=false >/dev/null || fail "without a gateway no certificate is needed"
shows "replicas: 0" kruntimes-runtimes --set runtimes.python.replicas=0
shows "runs: 0" kruntimes-runtimes --set runtimes.python.capacity.runs=0
shows "exposeErrors: false" kruntimes-runtimes --set runtimes.python.invocation.exposeErrors=false
hides "replicas:" kruntimes-runtimes --set runtimes.python.replicas=null,runtimes.bash.replicas=null
hides "kind: Runtime" kruntimes-runtimes --set runtimes.python.enabled=false,runtimes.bash.enabled=false
for language in python bash; do
  shows "kruntimes/runtime-$language:0.1.0" kruntimes-runtimes
  hides "name: $language" kruntimes-runtimes --show-only templates/runtimes.yaml --set "runtimes.$language.enabled=false"
done

# The same for every boolean and number there is: another value, false and 0 above all, changes what is rendered or is
# refused by its name (scenario 95).
mkdir -p "$tmp/show/templates"
printf 'apiVersion: v2\nname: show\nversion: 0.0.0\n' >"$tmp/show/Chart.yaml"
echo '{{ .Values | toJson }}' >"$tmp/show/templates/values.yaml"
leaves() {
  cp "$1/values.yaml" "$tmp/show/values.yaml"
  helm template show "$tmp/show" | tail -n 1 | jq -r 'paths(type == "boolean" or type == "number") as $path
    | select($path | all(type == "string")) | [($path | join(".")), getpath($path)] | @tsv'
}
heard=0
for chart in kruntimes kruntimes-runtimes; do
  while read -r leaf value; do
    # What is off renders nothing of its settings.
    context=()
    case $leaf in
      gateway.tls.certManager.enabled) continue ;; # it is refused beside existingSecret, above
      *.enabled) ;;
      gateway.autoscaling.* | metrics.podMonitor.* | metrics.prometheusRule.* | metrics.dashboard.*) context=(--set "${leaf%.*}.enabled=true") ;;
    esac
    case $value in
      true) other=false ;;
      false) other=true ;;
      0) other=1 ;;
      *) other=0 ;;
    esac
    before=$(render "$chart" "${context[@]}")
    if after=$(render "$chart" "${context[@]}" --set "$leaf=$other"); then
      [[ $before != "$after" ]] || fail "$chart: $leaf=$other changes nothing"
    else
      grep -qF -e "/${leaf//.//}" -e "$leaf" <<<"$after" || fail "$chart: $leaf=$other is refused without its name: $after"
    fi
    heard=$((heard + 1))
  done < <(leaves "$chart")
done
((heard > 25)) || fail "only $heard values were found"

# === what must be there ===
count 2 "kind: CustomResourceDefinition" kruntimes --show-only templates/crds.yaml
count 2 "helm.sh/resource-policy: keep" kruntimes --show-only templates/crds.yaml
shows "secretName: cert" "${gateway[@]}"
shows "--serving-secret=cert" kruntimes
shows "--namespaces=a,b" "${gateway[@]}" --set 'scope.namespaces={a,b}'
hides "kind: ClusterRoleBinding" kruntimes --set 'scope.namespaces={a,b}'
count 4 "namespace: a" kruntimes --show-only templates/rbac.yaml --set 'scope.namespaces={a}'
shows "port: 443" "${gateway[@]}"
digest=$(printf 'a%.0s' {1..64})
shows "registry.example.com/kruntimes/gateway:0.1.0" kruntimes --set images.registry=registry.example.com
shows "image: other.example.com/gw:1@sha256:$digest" kruntimes --set "images.registry=registry.example.com,gateway.image=other.example.com/gw:1@sha256:$digest"
for template in gateway scheduler; do
  for line in "runAsNonRoot: true" "type: RuntimeDefault" "allowPrivilegeEscalation: false" "readOnlyRootFilesystem: true" "drop: [ALL]" "enableServiceLinks: false"; do
    count 1 "$line" kruntimes --show-only "templates/$template.yaml"
  done
done

# === what is optional ===
# A field that the autoscaler owns must not be rendered, or the next upgrade is refused.
hides "replicas: 2" "${gateway[@]}" --set gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=3
shows "kind: HorizontalPodAutoscaler" kruntimes --set gateway.autoscaling.enabled=true
count 2 "kind: PodMonitor" kruntimes --set metrics.podMonitor.enabled=true
shows "matchNames:" kruntimes --set 'metrics.podMonitor.enabled=true,scope.namespaces={a}'
# Their own templates ($labels) are left to Prometheus and Grafana.
# shellcheck disable=SC2016
shows '{{ $labels.pod }}' kruntimes --set metrics.prometheusRule.enabled=true
shows '"legendFormat": "{{status}}"' kruntimes --set metrics.dashboard.enabled=true
# The test cluster does not enforce NetworkPolicies; that they say the right thing is seen here.
policy=$(document NetworkPolicy kruntimes-gateway kruntimes --set gateway.networkPolicy.enabled=true)
grep -qx '        - {port: https, protocol: TCP}' <<<"$policy" || fail "the gateway's policy lacks its port: $policy"
! grep -q 'from:' <<<"$policy" || fail "an empty list of peers must let all callers in: $policy"
policy=$(document NetworkPolicy kruntimes-gateway kruntimes --set gateway.networkPolicy.enabled=true \
  --set 'gateway.networkPolicy.from[0].podSelector.matchLabels.a=b,gateway.networkPolicy.metricsFrom[0].ipBlock.cidr=10.0.0.0/8')
[[ $(grep -c 'from:' <<<"$policy") == 2 && $policy == *'port: admin'*'cidr: 10.0.0.0/8'* ]] || fail "the gateway's policy lacks its peers: $policy"
policy=$(document NetworkPolicy kruntimes-scheduler kruntimes --set scheduler.networkPolicy.enabled=true)
grep -qx '  ingress: \[\]' <<<"$policy" || fail "nobody may connect to the scheduler: $policy"
# Environment of the user's takes the place of the chart's; two of a name are refused by the API server.
count 1 "name: KRUNTIMES_LOG_FILTER" "${gateway[@]}" --set 'gateway.extraEnv[0].name=KRUNTIMES_LOG_FILTER,gateway.extraEnv[0].value=debug'
shows "value: debug" "${gateway[@]}" --set 'gateway.extraEnv[0].name=KRUNTIMES_LOG_FILTER,gateway.extraEnv[0].value=debug'
# Spans go nowhere, or from gateways and pools to the same place.
hides "OTEL_" kruntimes
hides "OTEL_" kruntimes --set tracing.sampler=parentbased_always_off
tracing=(--set tracing.otlpEndpoint=http://c.d:4317 --set tracing.sampler=parentbased_traceidratio --set-string tracing.samplerArg=0.1)
for line in 'value: http://c.d:4317' 'value: parentbased_traceidratio' 'value: "0.1"'; do
  count 1 "$line" "${gateway[@]}" "${tracing[@]}"
done
for pair in OTEL_EXPORTER_OTLP_ENDPOINT=http://c.d:4317 OTEL_TRACES_SAMPLER=parentbased_traceidratio OTEL_TRACES_SAMPLER_ARG=0.1; do
  shows "--pool-otel=$pair" kruntimes --show-only templates/scheduler.yaml "${tracing[@]}"
done
# C-3.13: 300 s for running calls, unless the Pod gets less time.
shows "value: 300s" "${gateway[@]}"
shows "value: 40s" "${gateway[@]}" --set gateway.terminationGracePeriodSeconds=60
shows "value: 1s" "${gateway[@]}" --set gateway.terminationGracePeriodSeconds=0
count 2 "kind: ValidatingAdmissionPolicyBinding" kruntimes
hides "ValidatingAdmissionPolicy" kruntimes --set admissionPolicy.enabled=false
count 2 "key: kubernetes.io/metadata.name" kruntimes --set 'scope.namespaces={a}'
# With the CRDs stays what the Pods of Runtimes need to clean up after the Runs that stay (scenario 92).
[[ $(document ClusterRole kruntimes-runtimed kruntimes) == *'helm.sh/resource-policy: keep'* ]] || fail "the role of pools must outlive an uninstall"
count 10 "helm.sh/hook: test" kruntimes-runtimes
hides "helm.sh/hook" kruntimes-runtimes --set test.enabled=false
hides "hook-succeeded" kruntimes-runtimes

# The role that view is made of may not `get` Runs: that would be the right to call them.
view=$(render kruntimes --show-only templates/user-roles.yaml | sed -n '/name: kruntimes-view/,/^---/p')
grep -A1 'resources: \[runs\]' <<<"$view" | grep -qx '    verbs: \[list, watch\]' || fail "kruntimes-view has other verbs on runs than list and watch: $view"

# === a selector does not change with the version: Kubernetes would refuse the upgrade ===
cp -r kruntimes "$tmp/next"
sed -i 's/0\.1\.0/9.9.9/' "$tmp/next/Chart.yaml"
selectors() { awk '/matchLabels:|^  selector:/ {n = 3} n-- > 0'; }
render kruntimes | selectors >"$tmp/now.txt"
helm template t "$tmp/next" -n kruntimes-system --set gateway.tls.existingSecret=cert >"$tmp/next.yaml"
selectors <"$tmp/next.yaml" >"$tmp/next.txt"
grep -q kruntimes-gateway "$tmp/now.txt" || fail "no selector was found"
diff "$tmp/now.txt" "$tmp/next.txt" || fail "selectors change with the version"
grep -q 'kruntimes/gateway:9.9.9' "$tmp/next.yaml" || fail "the image does not follow appVersion"

((failures == 0)) || { echo "charts/test.sh: $failures failed" >&2 && exit 1; }
