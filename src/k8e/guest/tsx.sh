#!/bin/sh
# tsx for every sandbox; one of the image's own, or one that pip or npm installed, comes before it.
tools=/opt/k8e/tools/node_modules/tsx/dist
if ! command -v node >/dev/null 2>&1; then
    echo "tsx: there is no node on PATH, and TypeScript needs it: use a template whose image has Node.js" >&2
    exit 127
fi
if ! [ -f "$tools/loader.mjs" ]; then
    echo "tsx: it is not installed on this machine: install.sh brings it" >&2
    exit 127
fi
case "$1" in
    # A file: node alone can run it, in one process instead of two.
    [!-]*.ts | [!-]*.mts | [!-]*.cts | [!-]*.tsx | [!-]*.js | [!-]*.mjs | [!-]*.cjs) exec node --import "$tools/loader.mjs" "$@" ;;
    *) exec node "$tools/cli.mjs" "$@" ;;
esac
