#!/bin/sh
# check.sh: lints, types and the shape of the npm package; quick when nothing has changed since it was clean.
set -eu
cd "$(dirname "$0")"
sh setup.sh
if [ ! -f node_modules/.stamp ]; then
    echo "the TypeScript SDK is not checked: its packages are not there" >&2
    exit 0
fi
now=$(find . -type f \( -path './src/*' -o -path './tests/*' -o -path './examples/*' -o -path './bench/*' -o -name '*.json' \
    -o -name '*.js' -o -name '*.mjs' -o -name '*.ts' -o -name '*.md' \) ! -path './node_modules/*' ! -path './dist/*' \
    ! -path './docs/*' | LC_ALL=C sort | xargs sha256sum | sha256sum)
if [ "$(cat node_modules/.checked 2>/dev/null)" != "$now" ]; then
    npm run --silent check
    echo "$now" >node_modules/.checked
fi
