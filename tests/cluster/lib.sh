# Sourced by the scripts of this folder and of modules/: the cache and how its artifacts come to be.
# shellcheck shell=bash disable=SC2034
shopt -s inherit_errexit

CLUSTER=gptddp # as in operator/kind.yaml
CACHE=${GPTDDP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gptddp}
MODULES=$(cd "$(dirname "${BASH_SOURCE[0]}")/modules" && pwd)
# `modules` puts kind and kubectl here. They go before others on PATH, being of the right versions.
PATH=$CACHE/bin:$PATH

# The newest Kubernetes whose kubelet still runs on cgroup v1 machines without being told to. The
# versions of etcd, CoreDNS and pause are those that its kubeadm asks for.
K8S=v1.34.4 ETCD=3.6.5-0 COREDNS=v1.12.1 PAUSE=3.10.1
KIND=v0.30.0 OPERATOR=v1.9.4
GO=1.26 # the oldest that builds all of these: the operator v1.9.4 and Kueue v0.19 ask for it

say() { printf '[%(%H:%M:%S)T] %s\n' -1 "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# need COMMAND FIX: ends the script where COMMAND is missing
need() {
  command -v "$1" >/dev/null || die "$1 is not installed: $2"
}

need_go() {
  local fix="https://go.dev/dl, version $GO or newer, first on PATH" version
  need go "$fix"
  version=$(go env GOVERSION)
  printf 'go%s\n' "$GO" "${version#go}" | sort --check=quiet --version-sort || die "$version is too old: $fix"
}

# One script at a time builds for the cache, removes from it, or makes the cluster. Those that it calls
# belong to it. It is held until the end of the script and of all that it has started.
lock_cache() {
  [[ -z ${GPTDDP_CACHE_LOCKED-} ]] || return 0
  mkdir -p "$CACHE"
  exec 9>>"$CACHE/lock"
  flock --nonblock 9 || {
    say "waiting for another script that uses $CACHE: process $(cat "$CACHE/lock")"
    flock 9
  }
  echo "$$, $0" >"$CACHE/lock"
  export GPTDDP_CACHE_LOCKED=yes
}

# key WORD...: a hash of words; of a word that names a file or a folder, of what is in it.
key() {
  local word
  for word in "$@"; do
    echo "$word" | sed "s#^${MODULES%/modules}/##"
    [[ ! -e $word ]] || find "$word" -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
  done | sha256sum | cut -c1-12
}

# artifact NAME KEY COMMAND...: prints the folder NAME-KEY of the cache. Where it is missing, COMMAND
# fills a folder (its last argument) that gets the name only when COMMAND has ended well: what a
# killed build leaves is never believed. Artifacts of the same name with other keys are removed.
artifact() {
  local name=$1 folder=$CACHE/$1-$2
  shift 2
  if [[ ! -d $folder ]]; then
    say "building $name, to be kept in $folder"
    rm -rf "$CACHE/$name"-????????????{,.part}
    mkdir -p "$folder.part"
    "$@" "$folder.part" >&2
    mv "$folder.part" "$folder"
  fi
  echo "$folder"
}
