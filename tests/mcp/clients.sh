#!/bin/sh
# clients.sh FOLDER: gets the MCP clients of others that tests drive our server with, pinned with hashes; quick when they
# are in place. Where there is no npm, or no network, those tests are skipped, so nothing here is an error.
set -u
folder=$1
source=$(dirname "$0")/../../requirements/mcp-clients
if ! command -v npm >/dev/null 2>&1; then
    echo "there is no npm; the tests with the TypeScript client and the MCP inspector will be skipped" >&2
    exit 0
fi
cmp -s "$source/package-lock.json" "$folder/.stamp" && exit 0
rm -rf "$folder" && mkdir -p "$folder" && cp "$source/package.json" "$source/package-lock.json" "$folder/" || exit 0
# Not `npm ci`: it wants packages of other platforms in the lock, which npm itself leaves out.
if said=$(cd "$folder" && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error 2>&1); then
    cp "$source/package-lock.json" "$folder/.stamp"
else
    rm -rf "$folder"
    printf '%s\n' "$said" "could not fetch the MCP clients; some tests will be skipped" >&2
fi
