#!/bin/sh
# client.sh PYTHON FOLDER: makes an environment with agent-sandbox's own client, pinned with hashes; quick when it is in
# place. Where there is no network, the tests with it are skipped, so nothing here is an error.
set -u
python=$1
folder=$2
source=$(dirname "$0")/../../requirements/agent-sandbox-client.txt
cmp -s "$source" "$folder/.stamp" && exit 0
rm -rf "$folder"
if "$python" -m venv "$folder" && "$folder/bin/python" -m pip --disable-pip-version-check --quiet install \
    --require-hashes -r "$source" >/dev/null 2>&1; then
    cp "$source" "$folder/.stamp"
else
    rm -rf "$folder"
    echo "could not fetch agent-sandbox's client; some tests will be skipped" >&2
fi
