#!/bin/sh
# packages.sh FOLDER: gets the Debian packages that only the tests use; quick when they are in place. Tools are
# installed; programs that would come with a service are only unpacked, into FOLDER. A test whose tool is missing says so
# and is skipped, so nothing here is an error.
set -u
TOOLS="nftables iptables zsh fish shellcheck git uidmap passt python3-pandas python3-matplotlib postgresql"
UNPACKED="docker-registry busybox-static"
folder=$1

command -v dpkg-query >/dev/null 2>&1 || exit 0
missing=
for package in $TOOLS; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || [ ! -d "$folder" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "some tests will be skipped, since these can only be installed by root:$missing" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=120 update >/dev/null || :
if [ -n "$missing" ]; then
    echo "installing what only the tests use:$missing"
    # Tests make PostgreSQL clusters of their own; none of the machine's is to be made and started.
    cluster=/etc/postgresql-common/createcluster.conf
    if [ ! -e "$cluster" ] && mkdir -p "${cluster%/*}"; then
        echo "create_main_cluster = false" >"$cluster"
    fi
    # Word splitting makes the list of packages.
    # shellcheck disable=SC2086
    apt-get -qq -y -o DPkg::Lock::Timeout=120 install --no-install-recommends \
        -o Dpkg::Options::=--path-exclude='/usr/share/man/*' $missing >/dev/null ||
        echo "could not install all of:$missing; some tests will be skipped" >&2
fi
[ ! -d "$folder" ] || exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# apt fetches as a user of its own, who must be able to write there.
chmod 755 "$scratch" && mkdir -m 777 "$scratch/fetched"
# shellcheck disable=SC2086
if (cd "$scratch/fetched" && apt-get -qq download $UNPACKED >/dev/null); then
    for file in "$scratch"/fetched/*.deb; do
        dpkg -x "$file" "$scratch/unpacked"
    done
    mv "$scratch/unpacked" "$folder"
else
    echo "could not fetch $UNPACKED; some tests will be skipped" >&2
fi
