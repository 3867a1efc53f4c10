#!/usr/bin/env bash
# Prints the path of a Python that has this project's dependencies, installing them where none has.
#
#   tools/setup.sh [--check] [EXTRA]      EXTRA: test or dev (dev includes test)
#
# The active Python if it has them all, else .venv in the repository, made on first use with the
# versions in constraints.txt. --check installs nothing and fails instead. Progress goes to stderr.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$root/.venv
check_only=
if [[ ${1:-} == --check ]]; then
  check_only=1
  shift
fi
extra=${1:-}

say() { printf 'set-up: %s\n' "$*" >&2; }

# The versions of pyproject.toml. Some commands named python only say that there is none (pyenv's), so each is tried.
supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

has_dependencies() { "$1" "$root/tools/dependencies.py" "$extra" >/dev/null 2>&1; }

# The stamp is written last, and one for other requirements differs. While packages are installed there is a
# mark, which stays if that is cut short; pip itself undoes what it fails in. A .venv that someone else made has
# no marker, and is judged by its packages.
fingerprint() { cat "$root/pyproject.toml" "$root/constraints.txt" | cksum; }
stamp() { printf '%s/.installed-%s' "$venv" "${1:-base}"; }
is_ours() { [[ -e $venv/.made-by-setup ]]; }
# Its Python can go on being used: it runs, and no installation was cut short.
is_complete() { supported "$venv/bin/python" && ! cut_short && compgen -G "$venv/.installed-*" >/dev/null; }
cut_short() { [[ -e $venv/.installing ]]; }
ready() {
  [[ -x $venv/bin/python ]] || return 1
  if is_ours; then
    ! cut_short && [[ -e $(stamp "$extra") && $(<"$(stamp "$extra")") == "$(fingerprint)" ]]
  else
    has_dependencies "$venv/bin/python"
  fi
}

find_base() {
  local name candidate without_venv=""
  for name in python3 python3.1{3,2,1,0,4} python; do
    while read -r candidate; do
      [[ ! $(dirname "$candidate") -ef $venv/bin ]] || continue
      supported "$candidate" || continue
      if can_make_venv "$candidate"; then
        printf '%s\n' "$candidate"
        return
      fi
      without_venv=$candidate
    done < <(type -ap "$name")
  done
  if [[ -n $without_venv ]]; then
    local version
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "$without_venv cannot make virtual environments (no venv or ensurepip)"
    say "  fix: apt install python$version-venv (Debian, Ubuntu)"
  else
    say "no Python 3.10 to 3.14 found (python3 here: $(python3 --version 2>/dev/null || echo none))"
    say "  fix: apt install python3-venv (Debian 12 and 13, Ubuntu 22.04 and later), dnf install python3 (Fedora),"
    say "       dnf install python3.12 (RHEL), or activate such an environment"
  fi
  return 1
}

# Keeps pip's output in a file; on a terminal shows what it is at, and if it fails, what it said last.
with_ticker() {
  local log=$venv/install.log status=0 ticker=""
  if [[ -t 2 ]]; then
    while sleep 1; do
      printf '\r\033[K  %4d s  %.90s' "$SECONDS" "$(grep -E '^ *(Coll|Down|Inst)' "$log" | tail -n 1)" >&2
    done 9>&- &
    ticker=$!
    # shellcheck disable=SC2064 # the process of this call
    trap "kill $ticker 2>/dev/null" EXIT
  fi
  "$@" >"$log" 2>&1 || status=$?
  if [[ -n $ticker ]]; then
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    trap - EXIT
    printf '\r\033[K' >&2
  fi
  if ((status)); then
    grep -v '^WARNING' "$log" | tail -n 15 >&2
    say "the installation failed; all it said is in $log"
  fi
  return "$status"
}

install() {
  local base=$1
  if is_ours && ! is_complete; then
    say "an earlier installation was interrupted, or its Python is gone: starting again"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
  fi
  if [[ ! -x $venv/bin/python ]]; then
    say "making .venv with $("$base" --version) ($base)"
    touch "$venv/.made-by-setup"
    "$base" -m venv "$venv"
  fi
  touch "$venv/.installing"
  say "installing PyTorch and the other dependencies (constraints.txt); a minute or more, once"
  with_ticker "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile \
    --progress-bar off -c "$root/constraints.txt" -e "$root${extra:+[$extra]}" || {
    rm -f "$venv/.installing"
    return 1
  }
  # pip would compile with one core. What this Python cannot read stays as it is: nothing here imports it.
  "$venv/bin/python" -m compileall -q -j 0 -x '/site-packages/(.*/tests?|torch/testing/_internal)/' \
    "$venv"/lib/python3*/site-packages >/dev/null || true
  rm -f "$venv"/.installed-*
  local part
  for part in base test dev; do
    fingerprint >"$(stamp "$part")"
    [[ $part == "${extra:-base}" ]] && break
  done
  rm -f "$venv/.installing"
  say "done in $SECONDS s"
}

# Lock a file inside .venv, so that two set-ups at once become one; flock is part of Linux's base.
set_up() {
  local base=""
  if [[ -x $venv/bin/python ]] && ! is_ours; then
    say "$venv was not made by this script, and lacks:"
    say "  $("$venv/bin/python" "$root/tools/dependencies.py" "$extra" 2>&1)"
    say "  fix: .venv/bin/python -m pip install -c constraints.txt -e '.${extra:+[$extra]}', or remove .venv"
    return 1
  fi
  is_complete || base=$(find_base)
  mkdir -p "$venv"
  exec 9>"$venv/.lock"
  if command -v flock >/dev/null && ! flock -n 9; then
    say "another set-up is running: waiting for it"
    flock 9
  fi
  ready || install "$base"
  exec 9>&-
}

active=$(type -p python3 || type -p python || true)
if [[ -n $active && $(readlink -f "$(dirname "$active")") != "$venv/bin" ]] && has_dependencies "$active"; then
  "$active" -c 'import sys; print(sys.executable)'
  exit
fi
if ! ready; then
  [[ -z $check_only ]] || exit 1
  set_up
fi
printf '%s\n' "$venv/bin/python"
