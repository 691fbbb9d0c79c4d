#!/bin/sh
# setup.sh: gets the locked packages that the TypeScript SDK is built, checked and tested with; quick when they are in
# place. Where there is no npm, or no network, its tests are skipped, so nothing here is an error.
set -u
cd "$(dirname "$0")" || exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "there is no npm; the tests of the TypeScript SDK will be skipped" >&2
    exit 0
fi
# `make check` and `make test` may run at once: npm breaks if two of them fill one folder.
exec 9>.setup.lock
flock 9 2>/dev/null || :
cmp -s package-lock.json node_modules/.stamp && exit 0
if said=$(npm ci --ignore-scripts --no-audit --no-fund --loglevel=error 2>&1); then
    cp package-lock.json node_modules/.stamp
else
    rm -rf node_modules
    printf '%s\n' "$said" "could not fetch the packages of the TypeScript SDK; its tests will be skipped" >&2
fi
