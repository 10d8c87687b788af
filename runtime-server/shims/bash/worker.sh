# The other end of the control lines: one warm Bash per registration.
#
#   bash -p worker.sh FILE FUNCTION
#
# Standard input is a socket to the server. It is moved away before the user's file is sourced, and closed
# wherever the user's code runs, so that nothing which that code prints or reads can touch it. Payload and
# output never cross it: they go through files that the server makes for each call (src/worker/lines.rs).
#
# All of it is one compound command, parsed before the user's file can change how Bash parses, and at top level,
# because `declare` in a file that is sourced by a function makes local variables. The user's code may give its
# functions the names of builtins (hence `builtin`) and change options and traps (hence what is put aside).
# shellcheck shell=bash disable=SC1090,SC2154
{
  exec 200<&0 </dev/null
  set +p +o posix
  __kr_file=$1 __kr_function=$2
  set --

  __kr_refuse() {
    builtin printf 'failed %s\n' "$1" >&200
    builtin exit 1
  }

  if [[ ! -f $__kr_file ]]; then
    __kr_refuse "there is no file $__kr_file"
  fi
  builtin source "./$__kr_file" 200>&-
  __kr_status=$?
  # What the file switched on is meant for the function; here it would end the loop.
  __kr_options=()
  for __kr_option in errexit nounset xtrace; do
    if [[ -o $__kr_option ]]; then __kr_options+=("$__kr_option"); fi
  done
  { builtin set +eux; } 2>/dev/null
  __kr_traps=$(builtin trap -p ERR DEBUG)
  builtin trap - ERR DEBUG
  if ((__kr_status != 0)); then
    __kr_refuse "$__kr_file ended with status $__kr_status when it was sourced"
  fi
  if ! builtin declare -F -- "$__kr_function" >/dev/null; then
    __kr_refuse "$__kr_file has no function $__kr_function"
  fi

  # Runs one call, in a subshell: no call finds what another left behind.
  __kr_run() {
    builtin trap __kr_end EXIT
    # Without its input a function must not run: it could take that for an answer.
    builtin mapfile -d '' -t __kr_input <"$__kr_path.in" || builtin kill -s KILL "$BASHPID"
    builtin export KRUNTIME_INVOCATION_ID="$__kr_id" KRUNTIME_DEADLINE_MILLIS="$__kr_deadline"
    builtin unset -v TRACEPARENT TRACESTATE
    if [[ -n $__kr_trace ]]; then builtin export TRACEPARENT="$__kr_trace"; fi
    if [[ -n $__kr_state ]]; then builtin export TRACESTATE="$__kr_state"; fi
    builtin eval "$__kr_traps"
    for __kr_option in "${__kr_options[@]}"; do builtin set -o "$__kr_option"; done
    "$__kr_function" "${__kr_input[0]}"
    __kr_end
  }

  # A call ends here by `return`, `exit` or `set -e`. A status above 128 is also what a signal leaves behind;
  # the mark says that it was none.
  __kr_end() {
    __kr_status=$?
    if ((__kr_status > 128)); then : >|"$__kr_path.end"; fi
    builtin exit "$__kr_status"
  }

  builtin printf 'ready %s\n' "$BASH_VERSION" >&200
  # With -t, because the user's TMOUT would be the default.
  while IFS=' ' builtin read -r -t 99999999 -u 200 __kr_call __kr_deadline __kr_id &&
    IFS='' builtin read -r -u 200 __kr_trace && IFS='' builtin read -r -u 200 __kr_state &&
    IFS='' builtin read -r -u 200 __kr_path; do
    (__kr_run) 200>&- >"$__kr_path.out"
    __kr_status=$?
    # Only signals that kill: a broken pipe (141) or an interrupted command is a status like any other where
    # the function has replaced the trap that leaves the mark.
    if [[ " 132 134 135 136 137 139 143 159 " == *" $__kr_status "* && ! -e $__kr_path.end ]]; then
      # The process of the call was killed, by itself or for lack of memory. Die of the same: the server then
      # says so to the caller, ends what is left of the call, and starts anew.
      builtin kill -s "$((__kr_status - 128))" "$$"
      builtin exit "$__kr_status"
    fi
    builtin printf 'done %s %s\n' "$__kr_call" "$__kr_status" >&200
  done
  builtin exit 0
}
