# shellcheck shell=bash
# What k6 calls and as whom, for dev/load: copies of the example on Pods of their own, and new callers of them. Their
# namespace is TARGET_NAMESPACE; the copies carry the label loadtest=function.

# make_functions: FUNCTIONS copies of the example on PODS Pods, and one caller of all.
make_functions() {
  local at name names=() each=$(((FUNCTIONS + PODS - 1) / PODS))
  for ((at = 0; at < FUNCTIONS; at++)); do names+=("load-$at"); done
  # What an earlier run left may be on its way out, and a Run's spec is frozen.
  kube delete run -l loadtest=function --ignore-not-found >/dev/null
  "$ROOT/dev/in" helm upgrade --install load charts/kruntimes-runtimes --namespace "$TARGET_NAMESPACE" --create-namespace \
    --set "runtimes.python.replicas=$PODS,runtimes.python.capacity.runs=$each,runtimes.python.resources.limits.memory=1Gi" \
    --set "runtimes.bash.enabled=false,test.enabled=false" >/dev/null
  await 240 "the pool of Runtime python to have $PODS ready Pods with room for $each functions each" pool_is_settled
  for name in "${names[@]}"; do
    echo ---
    # Copies tell their Run's UID, so that an answer of another function is seen.
    sed "s/^  name: hello\$/  name: $name\n  labels: {loadtest: function}/; s/\"hello\": name,/& \"run\": context.run_uid,/" examples/hello/run.yaml
  done | kube apply -f - >/dev/null
  sed "s/hello-caller/load-caller/; s/\[hello\]/[$(IFS=, && echo "${names[*]}")]/" examples/hello/caller.yaml | kube apply -f - >/dev/null
  functions_are_ready || die "not all $FUNCTIONS functions become Ready; dev/in kubectl -n $TARGET_NAMESPACE get runs -o wide says why"
  functions_are_spread || die "the functions are not on $PODS Pods; dev/in kubectl -n $TARGET_NAMESPACE get runs -o wide says where they are"
}

functions_are_spread() { (($(kube get run -l loadtest=function -o json | jq '[.items[].status.assignedPod] | unique | length') == PODS)); }

functions_are_ready() { kube wait --for condition=Ready run -l loadtest=function --timeout 240s >/dev/null; }

# pool_is_settled: the Runtime as it is now has become Pods, and all of them are ready.
pool_is_settled() {
  kube get runtime python -o json | jq -e '.metadata.generation as $now
    | any(.status.conditions[]?; .type == "Accepted" and .status == "True" and .observedGeneration == $now)' >/dev/null &&
    kube rollout status deployment/runtime-python --watch=false | grep -q "successfully rolled out" &&
    [[ -z $(leaving_pods runtime=python) ]]
}

# leaving_pods LABEL: names of the Pods that are about to end.
leaving_pods() { kube get pods -l "$1" -o json | jq -r '.items[].metadata | select(.deletionTimestamp) | .name'; }

forget_functions() { kube delete run -l loadtest=function --ignore-not-found --wait=false >/dev/null; }

# make_callers FILE: CALLERS tokens that no gateway has seen, one a line after the status that their calls are to get.
# They are of nine ServiceAccounts; every tenth token is of one that may call nothing.
make_callers() {
  local at account accounts=()
  for ((at = 0; at < 9; at++)); do accounts+=("load-caller-$at"); done
  for account in "${accounts[@]}" load-stranger; do
    kube create serviceaccount "$account" --dry-run=client -o yaml
    echo ---
  done | kube apply -f - >/dev/null
  kube create rolebinding load-callers --role=load-caller "${accounts[@]/#/--serviceaccount=$TARGET_NAMESPACE:}" --dry-run=client -o yaml |
    kube apply -f - >/dev/null
  # shellcheck disable=SC2016 # One shell in the cluster's network instead of one for each token.
  "$ROOT/dev/in" bash -euc '
    for ((at = 0; at < $2; at++)); do
      status=200 account=load-caller-$((at % 10))
      if ((at % 10 == 9)); then status=403 account=load-stranger; fi
      token=$(kubectl -n "$1" create token "$account" --duration 10m)
      echo "$status $token"
    done' _ "$TARGET_NAMESPACE" "$CALLERS" >"$1"
}

# urls: endpoints of the functions, separated by spaces.
urls() {
  local which=(hello)
  [[ $TARGET_NAMESPACE == kruntimes-demo ]] || which=(-l loadtest=function)
  kube get run "${which[@]}" -o json | jq -r '[(.items // [.])[].status.endpoint.url] | join(" ")'
}
