#!/bin/sh
# Installs the systems that k8e is compared with in benchmarks: podman, crun, docker and what srt needs from the
# distribution, srt itself from npm. Run by `make bench-peers`, and by nothing else. Benchmarks use storage, daemons
# and settings of their own; nothing that this installs has to be running.
set -eu

here=$(dirname "$(readlink -f "$0")")
packages="podman crun docker.io bubblewrap socat ripgrep"

if ! command -v apt-get >/dev/null; then
    echo "this script knows Debian's packages only; install these by hand: $packages" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "installing packages needs root: sudo make bench-peers" >&2
    exit 1
fi
# Their services would start with the packages on a machine with systemd; benchmarks need none of them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086 # a list of names
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages
if command -v npm >/dev/null; then
    (cd "$here" && npm ci --ignore-scripts --no-audit --no-fund)
else
    echo "npm is not installed, so srt is left out" >&2
fi
