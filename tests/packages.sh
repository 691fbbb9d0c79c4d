#!/bin/sh
# Installs the Debian packages that only the tests use; quick when they are in place. A test whose tool is missing says
# so and is skipped, so this is never an error.
set -u
PACKAGES="nftables iptables zsh fish shellcheck git docker-registry busybox-static"

command -v dpkg-query >/dev/null 2>&1 || exit 0
missing=
for package in $PACKAGES; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "not installed, so some tests will be skipped:$missing" >&2
    exit 0
fi
echo "installing what only the tests use:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=120 update >/dev/null || :
# Word splitting makes the list of packages.
# shellcheck disable=SC2086
apt-get -qq -y -o DPkg::Lock::Timeout=120 install --no-install-recommends \
    -o Dpkg::Options::=--path-exclude='/usr/share/man/*' $missing >/dev/null ||
    echo "could not install all of:$missing; some tests will be skipped" >&2
