handler() {
  printf '%s' "$1"
}
