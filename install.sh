#!/bin/sh
# Installs k8e on this machine: from a git clone, or from the source that INSTALL_K8E_SOURCE names, which is also how
# `curl … | sh -` works. `sh install.sh --help` tells how.
#
# POSIX sh, and safe to run again: a step whose result is already in place is not repeated. All of it is functions but
# the last line, so that a script that was cut off on its way does nothing.

set -eu

# ---- What is installed: every version and checksum ------------------------------------------------------------------
# Python packages and tsx are pinned, with hashes, in requirements/.

# gVisor: the published release of this date, or the same source as a Go module.
GVISOR_RELEASE=20260905
GVISOR_MODULE=gvisor.dev/gvisor
GVISOR_VERSION=v0.0.0-20260905035102-160fafc42237
GVISOR_SUM='h1:AU5+CtCvnBnxdZRNcZt1NfSLqgkXZVT3N/u6u1aXg44='
GVISOR_URL=https://storage.googleapis.com/gvisor/releases/release/$GVISOR_RELEASE

RUNC_MODULE=github.com/opencontainers/runc
RUNC_VERSION=v1.5.2
RUNC_SUM='h1:eUUowc2WJCnFYzI87C1WqRcu356Dk/wsoi90y+2wEfE='
RUNC_OLDEST_MINOR=2 # an installed runc must be 1.2 or newer

GO_OLDEST_MINOR=24     # Go 1.24
PYTHON_OLDEST_MINOR=11 # Python 3.11
NODE_OLDEST_MAJOR=18   # for tsx
# ---------------------------------------------------------------------------------------------------------------------

usage() {
    cat <<USAGE
usage: sh install.sh [--quiet] [--deps-only | --uninstall | --purge]
       sh install.sh [--quiet] server|agent [FLAG...]

Installs k8e from this git clone: Debian packages (where root or sudo without a
password allows), gVisor's runsc, runc, the TypeScript runner, a Python virtual
environment and the command "k8e". A second run is quick and changes nothing.

With "server" or "agent", also gets the upstream programs of a cluster, and lets
"k8e server" or "k8e agent" start with these flags, now and with the machine. As
root; k8e-uninstall.sh, beside the command, removes all of it.

  --deps-only   everything but the virtual environment and the command
  --uninstall   end the gateway and its sandboxes, remove what this script put
                into K8E_HOME, and the command; say what stays, and where
  --purge       the same, and remove what stays: sessions, keys, logins
  --quiet       print warnings and errors only
  --help        print this

Environment:
  INSTALL_K8E_SOURCE
                install this instead: a folder, an archive (.tar.gz), or the URL
                of one; needed where there is no clone: curl … | sh -
  INSTALL_K8E_SOURCE_SHA256
                the archive's checksum; needed for a URL
  INSTALL_K8E_EXEC
                "server FLAG..." or "agent FLAG...", as above
  INSTALL_K8E_SKIP_START
                "true": prepare the server or agent, and do not start it
  K8E_URL, K8E_TOKEN
                the cluster to join, and the token for it; with K8E_URL, and no
                word of INSTALL_K8E_EXEC that says otherwise, it is an agent
  K8E_KUBECONFIG_OUTPUT
                where a server writes the administrator's kubeconfig
  K8E_HOME      where to install; now $home
  K8E_BIN_DIR   where the command goes; now $bin_dir
  K8E_DATA_DIR, K8E_RUN_DIR
                the gateway's folders, for --uninstall and --purge, if they are
                not the usual ones
USAGE
}

# ---- Talking --------------------------------------------------------------------------------------------------------

say() { if [ "$quiet" = no ]; then printf '%s\n' "$*"; fi; }

note() { say "      $*"; }

warn() { printf '      warning: %s\n' "$*" >&2; }

step() {
    step_number=$((step_number + 1))
    step_name=$1
    say "[$step_number/$step_count] $step_name"
}

# fail WHY WHAT-TO-DO: name the step, show the end of its output, and stop.
fail() {
    {
        printf '\ninstall.sh: step %s/%s failed: %s\n' "$step_number" "$step_count" "$step_name"
        printf '  why: %s\n' "$1"
        if [ "$work_status" != 0 ]; then
            printf '  the end of its output:\n'
            tail -n "+$work_line" "$log" | tail -n 15 | sed 's/^/    | /'
            if cp "$log" "$home/install.log" 2>/dev/null; then
                printf '  all of it: %s\n' "$home/install.log"
            fi
        fi
        printf '  what to do: %s\n' "$2"
    } >&2
    exit 1
}

# work MESSAGE COMMAND...: run the command with its output in the log, and show that something goes on.
work() {
    work_message=$1
    shift
    work_line=$(($(wc -l <"$log") + 1))
    printf '$ %s\n' "$*" >>"$log"
    work_start=$(date +%s)
    "$@" >>"$log" 2>&1 </dev/null 9>&- &
    child=$!
    work_told=0
    work_turn=0
    if [ "$quiet" = no ] && [ "$terminal" = no ]; then note "$work_message"; fi
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.1
        work_turn=$(((work_turn + 1) % 40))
        work_seconds=$(($(date +%s) - work_start))
        if [ "$quiet" = yes ]; then
            continue
        elif [ "$terminal" = yes ]; then
            case $((work_turn / 2 % 4)) in
            0) work_mark='.  ' ;;
            1) work_mark='.. ' ;;
            2) work_mark='...' ;;
            *) work_mark='   ' ;;
            esac
            printf '\r      %s (%s s) %s' "$work_message" "$work_seconds" "$work_mark"
        elif [ "$work_seconds" -ge $((work_told + 30)) ]; then
            work_told=$work_seconds
            note "... $work_seconds s"
        fi
    done
    if wait "$child"; then work_status=0; else work_status=$?; fi
    child=
    if [ "$quiet" = no ] && [ "$terminal" = yes ]; then
        printf '\r\033[K      %s (%s s)\n' "$work_message" "$(($(date +%s) - work_start))"
    fi
    return "$work_status"
}

# end PID: end a process of ours and all that it started.
# shellcheck disable=SC2013,SC2317,SC2329 # one line of words; called by cleanup
end() {
    for end_child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do end "$end_child"; done
    kill "$1" 2>/dev/null || :
}

# shellcheck disable=SC2317,SC2329 # called by the trap
cleanup() {
    if [ -n "$child" ]; then
        end "$child"
        wait "$child" 2>/dev/null || :
    fi
    if [ -n "$work_dir" ]; then rm -rf "$work_dir"; fi
    if [ -n "$log" ]; then rm -f "$log"; fi
}

# ---- Small helpers --------------------------------------------------------------------------------------------------

have() { command -v "$1" >/dev/null 2>&1; }

sha256() { sha256sum "$1" | cut -d ' ' -f 1; }

# As root, or through sudo where that asks for no password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_apt() {
    have apt-get || return 1
    [ "$(id -u)" = 0 ] || { have sudo && sudo -n true 2>/dev/null; }
}

apt_install() {
    if [ "$apt_updated" = no ]; then
        apt_updated=yes
        # A stale list is not an error yet: the installation below will tell.
        work "reading the package lists" as_root apt-get -q -o DPkg::Lock::Timeout=120 update || :
    fi
    work "installing $*" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y -o DPkg::Lock::Timeout=120 install --no-install-recommends "$@"
}

# find_python MODULES: print the real path of a Python that is new enough and has these modules. The system's own comes
# first, because a python3 on PATH may be a slow shim.
find_python() {
    for find_python_it in /usr/bin/python3 /usr/bin/python3.14 /usr/bin/python3.13 /usr/bin/python3.12 \
        /usr/bin/python3.11 python3 python3.14 python3.13 python3.12 python3.11; do
        have "$find_python_it" || continue
        "$find_python_it" -c "
import sys, $1
if sys.version_info < (3, $PYTHON_OLDEST_MINOR): sys.exit(1)
print(sys.executable)" 2>/dev/null && return 0
    done
    return 1
}

# find_go: print a Go that is new enough.
find_go() {
    for find_go_it in go /usr/local/go/bin/go /usr/lib/go/bin/go; do
        have "$find_go_it" || continue
        find_go_minor=$("$find_go_it" env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
        if [ "${find_go_minor:-0}" -ge "$GO_OLDEST_MINOR" ]; then
            command -v "$find_go_it"
            return 0
        fi
    done
    return 1
}

# go_build MODULE PACKAGE VERSION SUM TAGS LDFLAGS CGO: build one program into $work_dir/go. Go checks each module
# against its checksum database; on top of that the main module must have the hash pinned above.
go_build() {
    GOBIN=$work_dir/go CGO_ENABLED=$7 GOFLAGS='' GOOS='' GOARCH='' \
        "$go" install -tags "$5" -ldflags "$6" "$1$2@$3" || return 1
    "$go" version -m "$work_dir/go/$(basename "$1$2")" | tr '\t' ' ' | grep -qF " mod $1 $3 $4" && return 0
    echo "the program that was built is not $1 $3 with the checksum $4"
    return 1
}

# A stamp beside a program says what it is: the wanted version, the program's hash, its source and its own version.
stamped() { sed -n "s/^$2=//p" "$home/bin/.$1.stamp" 2>/dev/null; }

is_stamped() {
    [ -x "$home/bin/$1" ] && [ "$(stamped "$1" wanted)" = "$2" ] &&
        [ "$(stamped "$1" sha256)" = "$(sha256 "$home/bin/$1")" ]
}

# put PROGRAM FILE WANTED SOURCE VERSION: move the file, or link to a program that the system maintains.
put() {
    rm -f "$home/bin/.$1.stamp"
    case $4 in
    system | package) ln -s "$2" "$work_dir/put" ;;
    *) chmod 755 "$2" && mv "$2" "$work_dir/put" ;;
    esac
    mv -f "$work_dir/put" "$home/bin/$1"
    printf 'wanted=%s\nsha256=%s\nsource=%s\nversion=%s\n' "$3" "$(sha256 "$home/bin/$1")" "$4" "$5" \
        >"$home/bin/.$1.stamp"
}

describe() {
    case $(stamped "$1" source) in
    system) describe_how="linked to $(readlink "$home/bin/$1")" ;;
    download) describe_how="published release" ;;
    go) describe_how="built with Go" ;;
    package) describe_how="the distribution's package" ;;
    *) describe_how="found there" ;;
    esac
    printf '%s (%s, %s)' "$home/bin/$1" "$(stamped "$1" version)" "$describe_how"
}

# of_machine PROGRAM: print the path of what root installed for everybody, if that is trustworthy: nobody but root may
# have put it there.
of_machine() {
    of_machine_it=$machine_home/bin/$1
    [ "$home" != "$machine_home" ] && [ -x "$of_machine_it" ] || return 1
    of_machine_it=$(readlink -f "$of_machine_it")
    for of_machine_path in "$of_machine_it" "$(dirname "$of_machine_it")"; do
        case $(stat -c '%u %A' "$of_machine_path") in
        "$machine_owner "?????w* | "$machine_owner "????????w*) return 1 ;;
        "$machine_owner "*) ;;
        *) return 1 ;;
        esac
    done
    printf '%s\n' "$of_machine_it"
}

# on_path PROGRAM: print the path of one that is not ours.
on_path() {
    on_path_it=$(PATH=$PATH:/usr/sbin:/sbin command -v "$1" 2>/dev/null) || return 1
    on_path_bin=$(cd "$home/bin" && pwd -P)
    case $(readlink -f "$on_path_it") in "$on_path_bin"/*) return 1 ;; esac
    if [ "$(cd "$(dirname "$on_path_it")" && pwd -P)" = "$on_path_bin" ]; then
        on_path_it=$(readlink -f "$on_path_it") # our link to it
    fi
    printf '%s\n' "$on_path_it"
}

# ---- Steps ----------------------------------------------------------------------------------------------------------

check_machine() {
    step "Checking this machine"
    os=$(uname -s)
    arch=$(uname -m)
    kernel=$(uname -r)
    [ "$os" = Linux ] || fail "k8e needs Linux, this is $os" "run it on a Linux machine, or in a virtual machine"
    case $arch in
    x86_64 | aarch64) ;;
    *) warn "gVisor does not support the processor $arch: only the container runtime will be usable" ;;
    esac
    kernel_major=${kernel%%.*}
    kernel_rest=${kernel#*.}
    kernel_minor=${kernel_rest%%[!0-9]*}
    if [ "$kernel_major" -lt 4 ] || { [ "$kernel_major" = 4 ] && [ "$kernel_minor" -lt 15 ]; }; then
        warn "Linux $kernel is older than 4.15: gVisor will not run"
    fi
    note "Linux $kernel on $arch, installing to $home"
    mkdir -p "$home/bin" 2>/dev/null || fail "cannot create $home/bin" \
        "run as a user who may write there, or set K8E_HOME to another folder"
    [ -w "$home/bin" ] || fail "$home/bin is not writable" \
        "run as a user who may write there, or set K8E_HOME to another folder"
    if have flock; then
        exec 9>>"$home/.install.lock"
        flock -n 9 || {
            note "waiting for another install.sh to finish"
            flock 9
        }
    fi
    log=$(mktemp)
}

# A folder for what is being made, beside its destination so that it can be moved there in one go.
need_work_dir() {
    [ -z "$work_dir" ] || return 0
    find "$home" -maxdepth 1 -name '.work.*' -exec rm -rf {} + # left by a run that was killed
    work_dir=$(mktemp -d "$home/.work.XXXXXX")
}

# has_library NAME: whether Python can load it, which is how k8e uses it.
has_library() { "$python" -I -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

system_packages() {
    step "System packages"
    missing=
    if python=$(find_python sys); then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
    else
        missing="$missing python3 python3-venv"
    fi
    sbin_path=$PATH:/usr/sbin:/sbin
    PATH=$sbin_path have mkfs.ext4 || missing="$missing e2fsprogs"
    PATH=$sbin_path have ip || missing="$missing iproute2"
    # It sets the rules that hold a sandbox's network; the program nft is not needed.
    has_library libnftables.so.1 || missing="$missing libnftables1"
    if have apt-get && [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then missing="$missing ca-certificates"; fi
    have node || missing="$missing nodejs npm"
    if [ "$(id -u)" != 0 ]; then # what a gateway needs that is not root
        have newuidmap || missing="$missing uidmap"
        have pasta || missing="$missing passt"
    fi
    missing=${missing# }
    if [ -z "$missing" ]; then
        note "nothing is missing"
    elif can_apt; then
        # Word splitting makes the list of packages.
        # shellcheck disable=SC2086
        apt_install $missing || {
            warn "could not install: $missing"
            tail -n 3 "$log" | sed 's/^/        | /' >&2
        }
    elif have apt-get; then
        warn "missing: $missing. Install them as root: apt-get install $missing"
    else
        warn "missing (Debian's names): $missing. Install them with this system's package manager"
    fi
    [ -n "$(find_python sys)" ] || fail "there is no Python 3.$PYTHON_OLDEST_MINOR or newer" \
        "install one (Debian 12 and Ubuntu 24.04 have it as python3) and run install.sh again"
    python=$(find_python ensurepip,venv) || fail "$(find_python sys) cannot make virtual environments" \
        "install its venv module (Debian: apt-get install python3-venv) and run install.sh again"
    note "Python: $python"
    has_library libnftables.so.1 || warn "no libnftables: k8e cannot give sandboxes a network"
}

# runsc_date PROGRAM: print the release date (YYYYMMDD) of a runsc. One that was built without a version string still
# carries its module version, which Go can read.
runsc_date() {
    runsc_date_it=$("$1" --version 2>/dev/null | grep -oE '20[0-9]{6}' | head -n 1)
    if [ -z "$runsc_date_it" ] && [ -n "$go" ]; then
        runsc_date_it=$("$go" version -m "$1" 2>/dev/null | tr '\t' ' ' |
            sed -n "s|^ mod $GVISOR_MODULE v[0-9.]*-\(20[0-9]\{6\}\).*|\1|p")
    fi
    printf '%s\n' "${runsc_date_it:-0}"
}

# The file, then its published checksum; the connection must stand within 5 seconds.
download_runsc() {
    "$python" -I - "$GVISOR_URL/$arch" "$work_dir" <<'PYTHON'
import hashlib, pathlib, shutil, signal, sys, urllib.request

url, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def fetch(name):
    def late(*_):
        raise TimeoutError("no answer within 5 seconds")
    signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    with urllib.request.urlopen(f"{url}/{name}", timeout=30) as answer, open(folder / name, "wb") as file:
        signal.alarm(0)
        shutil.copyfileobj(answer, file, 1 << 20)

try:
    fetch("runsc.sha512")
    fetch("runsc")
except OSError as error:
    sys.exit(f"{url}: {getattr(error, 'reason', error)}")
wanted = (folder / "runsc.sha512").read_text().split()[0]
with open(folder / "runsc", "rb") as file:
    if hashlib.file_digest(file, "sha512").hexdigest() != wanted:
        sys.exit(f"{url}/runsc does not have its published SHA-512 checksum")
PYTHON
}

install_gvisor() {
    step "gVisor (runsc): runs each sandbox on a kernel of its own"
    if is_stamped runsc "$GVISOR_VERSION"; then
        note "in place: $(describe runsc)"
        return
    fi
    need_work_dir
    go=$(find_go) || go=
    if [ -x "$home/bin/runsc" ] && [ ! -L "$home/bin/runsc" ] &&
        [ "$(runsc_date "$home/bin/runsc")" = "$GVISOR_RELEASE" ]; then
        cp "$home/bin/runsc" "$work_dir/runsc"
        put runsc "$work_dir/runsc" "$GVISOR_VERSION" found "release $GVISOR_RELEASE"
    elif runsc=$(on_path runsc) && [ "$(runsc_date "$runsc")" -ge "$GVISOR_RELEASE" ]; then
        put runsc "$runsc" "$GVISOR_VERSION" system "release $(runsc_date "$runsc")"
    elif runsc=$(of_machine runsc) && [ "$(runsc_date "$runsc")" -ge "$GVISOR_RELEASE" ]; then
        put runsc "$runsc" "$GVISOR_VERSION" system "release $(runsc_date "$runsc")"
    elif case $arch in x86_64 | aarch64) false ;; *) true ;; esac then
        warn "skipped on $arch"
        return
    elif work "downloading the release of $GVISOR_RELEASE" download_runsc &&
        chmod 755 "$work_dir/runsc" && "$work_dir/runsc" --version >>"$log" 2>&1; then
        put runsc "$work_dir/runsc" "$GVISOR_VERSION" download "release $GVISOR_RELEASE"
    elif note "could not be downloaded: $(tail -n 1 "$log")" && [ -n "$go" ] &&
        work "building it with $("$go" env GOVERSION), which takes a few minutes" go_build \
            "$GVISOR_MODULE" /runsc "$GVISOR_VERSION" "$GVISOR_SUM" "" \
            "-s -w -X $GVISOR_MODULE/runsc/version.version=$GVISOR_VERSION" 0 &&
        "$work_dir/go/runsc" --version >>"$log" 2>&1; then
        put runsc "$work_dir/go/runsc" "$GVISOR_VERSION" go "release $GVISOR_RELEASE"
    else
        if [ -n "$go" ]; then
            warn "the build failed:"
            tail -n 5 "$log" | sed 's/^/        | /' >&2
        else
            note "cannot be built: there is no Go 1.$GO_OLDEST_MINOR or newer"
        fi
        if can_apt && apt_install runsc && runsc=$(on_path runsc); then
            put runsc "$runsc" "$GVISOR_VERSION" package "release $(runsc_date "$runsc")"
            warn "this runsc is of $(runsc_date "$runsc"): older and slower than $GVISOR_RELEASE. For the newer one" \
                "install Go 1.$GO_OLDEST_MINOR, remove $home/bin/runsc and run install.sh again"
        else
            rm -f "$home/bin/runsc" "$home/bin/.runsc.stamp"
            warn "no gVisor. Sandboxes will run as plain containers: the code in them talks to this machine's own" \
                "kernel, so one kernel bug is enough to break out. Install Go 1.$GO_OLDEST_MINOR, or put runsc of" \
                "$GVISOR_RELEASE or newer on PATH, and run install.sh again"
            return
        fi
    fi
    note "$(describe runsc)"
}

# trial_bundle FOLDER: write a container with a user namespace, a seccomp filter and (as root) limits, that runs `true`.
trial_bundle() {
    "$python" -I - "$1" <<'PYTHON'
import json, os, pathlib, shutil, sys

trial = pathlib.Path(sys.argv[1])
trial.chmod(0o755)
rootfs = trial / "rootfs"
mounts = [{"destination": "/proc", "type": "proc", "source": "proc"},
          {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}]
for name in ("proc", "dev", "usr", "bin", "sbin", "lib", "lib64"):
    host = pathlib.Path("/", name)
    if host.is_symlink():
        (rootfs / name).symlink_to(os.readlink(host))
    elif host.is_dir():
        (rootfs / name).mkdir(parents=True)
        if name not in ("proc", "dev"):
            bind = {"destination": str(host), "type": "bind", "source": str(host), "options": ["rbind", "ro"]}
            mounts.append(bind)
root = os.geteuid() == 0
ids = {"containerID": 0, "hostID": 100000 if root else os.geteuid(), "size": 65536 if root else 1}
gids = ids if root else {**ids, "hostID": os.getegid()}
linux = {
    "namespaces": [{"type": kind} for kind in ("pid", "mount", "network", "ipc", "uts", "user")],
    "uidMappings": [ids],
    "gidMappings": [gids],
    "seccomp": {"defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": ["vhangup"], "action": "SCMP_ACT_ERRNO"}]},
}
if root:
    linux["resources"] = {"pids": {"limit": 64}, "memory": {"limit": 1 << 28}}
process = {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": [shutil.which("true") or "/bin/true"],
           "env": ["PATH=/usr/bin:/bin"], "noNewPrivileges": True}
config = {"ociVersion": "1.0.2", "root": {"path": "rootfs", "readonly": True}, "process": process,
          "mounts": mounts, "linux": linux, "hostname": "trial"}
(trial / "config.json").write_text(json.dumps(config))
PYTHON
}

# container_works PROGRAM: start that container for real.
container_works() {
    trial=$(mktemp -d "${TMPDIR:-/tmp}/k8e-trial.XXXXXX")
    trial_status=0
    if ! trial_bundle "$trial" ||
        ! (cd "$trial" && timeout 15 "$1" --root "$trial/state" run "k8e-trial-$$"); then
        trial_status=1
        "$1" --root "$trial/state" delete --force "k8e-trial-$$" >/dev/null 2>&1 || :
    fi
    rm -rf "$trial"
    return "$trial_status"
}

runc_version() { "$1" --version 2>/dev/null | sed -nE 's/^(runc|crun) version //p' | head -n 1; }

runc_is_new() {
    runc_minor=$(runc_version "$1" | sed -n 's/^1\.\([0-9]*\).*/\1/p')
    [ "${runc_minor:-0}" -ge "$RUNC_OLDEST_MINOR" ] || runc_version "$1" | grep -qE '^([2-9]|[1-9][0-9]+)\.'
}

# What building runc takes beside Go: a C compiler and libseccomp's headers.
can_build_runc() {
    [ -n "$go" ] || return 1
    if have gcc && have pkg-config && pkg-config --exists libseccomp; then return 0; fi
    can_apt && apt_install gcc libc6-dev pkg-config libseccomp-dev
}

install_runc() {
    step "runc: starts plain containers"
    for program in runc crun; do
        if is_stamped "$program" "$RUNC_VERSION"; then
            note "in place: $(describe "$program")"
            return
        fi
    done
    need_work_dir
    go=$(find_go) || go=
    if [ -x "$home/bin/runc" ] && [ ! -L "$home/bin/runc" ] && runc_is_new "$home/bin/runc" &&
        work "trying $home/bin/runc" container_works "$home/bin/runc"; then
        cp "$home/bin/runc" "$work_dir/runc"
        put runc "$work_dir/runc" "$RUNC_VERSION" found "$(runc_version "$home/bin/runc")"
        note "$(describe runc)"
        return
    fi
    for program in runc crun; do
        found=$(on_path "$program") || found=$(of_machine "$program") || continue
        if [ "$program" = runc ] && ! runc_is_new "$found"; then
            note "$found is $(runc_version "$found"), too old"
        elif work "trying $found" container_works "$found"; then
            put "$program" "$found" "$RUNC_VERSION" system "$(runc_version "$found")"
            note "$(describe "$program")"
            return
        else
            note "$found does not work here: $(tail -n 1 "$log")"
        fi
    done
    if can_build_runc && work "building runc with $("$go" env GOVERSION)" go_build \
        "$RUNC_MODULE" "" "$RUNC_VERSION" "$RUNC_SUM" seccomp "-s -w" 1; then
        if ! work "trying it" container_works "$work_dir/go/runc"; then
            warn "runc was built, but a trial container did not start: $(tail -n 1 "$log")." \
                "\"k8e doctor\" will say what is usable"
        fi
        put runc "$work_dir/go/runc" "$RUNC_VERSION" go "${RUNC_VERSION#v}"
        note "$(describe runc)"
        return
    fi
    if [ -n "$go" ]; then
        warn "runc could not be built:"
        tail -n 5 "$log" | sed 's/^/        | /' >&2
    fi
    if found=$(on_path runc) || { can_apt && apt_install runc && found=$(on_path runc); }; then
        if work "trying $found" container_works "$found"; then
            put runc "$found" "$RUNC_VERSION" package "$(runc_version "$found")"
            note "$(describe runc)"
            return
        fi
        note "$found does not work here: $(tail -n 1 "$log")"
    fi
    warn "no runc or crun that works: the container runtime will not be usable. Install runc 1.$RUNC_OLDEST_MINOR or" \
        "newer, or Go 1.$GO_OLDEST_MINOR with gcc, pkg-config and libseccomp-dev, and run install.sh again"
}

npm_install() {
    mkdir -p "$home/tools" && cp "$source_dir/requirements/tools/package.json" "$home/tools/" || return 1
    cp "$source_dir/requirements/tools/package-lock.json" "$home/tools/package-lock.json" || return 1
    # tsx works without the packages' install scripts, so none is run.
    (cd "$home/tools" && npm ci --ignore-scripts --no-audit --no-fund) || return 1
    cp "$home/tools/package-lock.json" "$home/tools/.stamp"
}

install_tsx() {
    step "TypeScript runner (tsx)"
    tsx_version=$(sed -n 's/^ *"tsx": "\(.*\)".*/\1/p' "$source_dir/requirements/tools/package.json")
    if [ -d "$home/tools/node_modules/tsx" ] &&
        cmp -s "$source_dir/requirements/tools/package-lock.json" "$home/tools/.stamp"; then
        note "in place: tsx $tsx_version"
        return
    fi
    tsx_lost="TypeScript code (--lang ts) will not run"
    if ! have npm || ! have node; then
        warn "no node or npm: $tsx_lost. Install Node.js with npm and run install.sh again"
    elif node_major=$(node --version | sed 's/^v\([0-9]*\).*/\1/') && [ "$node_major" -lt "$NODE_OLDEST_MAJOR" ]; then
        warn "Node.js $node_major is too old: $tsx_lost. Install version 20 and run install.sh again"
    elif work "installing tsx $tsx_version with npm" npm_install; then
        note "tsx $tsx_version in $home/tools"
    else
        rm -f "$home/tools/.stamp"
        warn "npm failed: $tsx_lost"
        tail -n 5 "$log" | sed 's/^/        | /' >&2
    fi
}

source_hash() {
    (
        cd "$source_dir"
        find src/k8e pyproject.toml hatch_build.py README.md LICENSE requirements/build.txt -type f ! -name '*.pyc' \
            -exec sha256sum {} + 2>/dev/null | sort -k 2 | sha256sum | cut -d ' ' -f 1
    )
}

# The build tools are installed, verified like all else, into a folder of their own and not into the environment.
install_package() {
    "$venv/bin/python" -m pip install -q --require-hashes --target "$work_dir/build" \
        -r "$source_dir/requirements/build.txt" &&
        PYTHONPATH=$work_dir/build "$venv/bin/python" -m pip install -q --no-build-isolation --no-deps \
            --force-reinstall "$source_dir"
}

install_k8e() {
    step "k8e: the Python package and the command"
    mkdir -p "$bin_dir" 2>/dev/null || :
    [ -w "$bin_dir" ] || fail "$bin_dir is not writable" "set K8E_BIN_DIR to a folder of yours that is on PATH"
    launcher=$bin_dir/k8e
    if [ -e "$launcher" ] && ! is_ours "$launcher"; then
        fail "$launcher exists and is not ours" "move it away, or set K8E_BIN_DIR to another folder on PATH"
    fi
    venv=$home/venv
    unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PYTHONHOME PYTHONPATH
    network_hint="if pip cannot reach its package index, check the network and proxy settings; then run install.sh again"

    wanted_python=$("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')
    if [ "$(cat "$venv/.python" 2>/dev/null)" != "$wanted_python" ] || [ ! -x "$venv/bin/python" ]; then
        work "making a virtual environment" "$python" -m venv --clear "$venv" ||
            fail "$python could not make $venv" "see the output above, then run install.sh again"
        printf '%s\n' "$wanted_python" >"$venv/.python"
    fi
    wanted_packages=$(sha256 "$source_dir/requirements/gateway.txt")
    if [ "$(cat "$venv/.packages" 2>/dev/null)" != "$wanted_packages" ]; then
        work "installing the Python packages, with their hashes checked" "$venv/bin/python" -m pip install -q \
            --require-hashes -r "$source_dir/requirements/gateway.txt" ||
            fail "pip could not install the Python packages" "$network_hint"
        printf '%s\n' "$wanted_packages" >"$venv/.packages"
    fi
    wanted_source=$(source_hash)
    if [ "$(cat "$venv/.source" 2>/dev/null)" != "$wanted_source" ]; then
        rm -f "$venv/.source"
        need_work_dir
        work "installing k8e" install_package || fail "pip could not install k8e from $source_dir" "$network_hint"
        work "checking it" "$venv/bin/python" -I -c 'import k8e.cli' ||
            fail "the installed package does not work" "check that the clone is complete (git status), then run again"
        printf '%s\n' "$wanted_source" >"$venv/.source"
    else
        note "in place: $venv"
    fi

    program=$venv/bin/python
    script=$(launcher_script)
    # The kernel reads 127 bytes of a first line, and splits it at spaces.
    case $program in
    *[[:space:]]*) shebang=no ;;
    *) if [ ${#program} -lt 120 ]; then shebang=yes; else shebang=no; fi ;;
    esac
    if [ "$shebang" = yes ]; then
        write_if_changed "$launcher" "#!$program -IS
$script"
    else
        write_if_changed "$home/launcher.py" "$script"
        write_if_changed "$launcher" "#!/bin/sh
# The command k8e, written by install.sh.
exec $(quoted "$program") -IS $(quoted "$home/launcher.py") \"\$@\""
    fi
    # K8E's own names for a part of it, unless K8E's own commands are there.
    for flat in "$bin_dir/k8e-sandbox" "$bin_dir/k8e-sandbox-cli"; do
        if [ -e "$flat" ] && ! is_ours "$flat"; then
            note "kept $flat, which is not ours; k8e sandbox does the same"
        else
            write_if_changed "$flat" "#!/bin/sh
# The command k8e, written by install.sh.
exec $(quoted "$launcher") sandbox \"\$@\""
        fi
    done
}

# The command is a script for the environment's Python that skips what it can: user paths (-I), the site module (-S).
# k8e looks for its tools in the default folder, so the script names any other.
launcher_script() {
    if [ "$home" = "$default_home" ]; then launcher_home=; else launcher_home=$home; fi
    "$python" -I - "$launcher_home" "$venv"/lib/python3.*/site-packages <<'PYTHON'
import sys

home, packages = sys.argv[1:]
lines = ['"""The command k8e, written by install.sh."""']
if home:
    lines += ["import os", "import sys", "", f'os.environ.setdefault("K8E_HOME", {home!r})']
else:
    lines += ["import sys", ""]
lines += [f"sys.path.insert(0, {packages!r})", "from k8e.cli import main", "", "sys.exit(main())"]
print("\n".join(lines))
PYTHON
}

quoted() { printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"; }

# write_if_changed FILE TEXT: whoever reads the file sees the old text or the new one.
write_if_changed() {
    if [ -x "$1" ] && [ "$(cat "$1")" = "$2" ]; then return; fi
    printf '%s\n' "$2" >"$1.new.$$"
    chmod 755 "$1.new.$$"
    mv -f "$1.new.$$" "$1"
    note "wrote $1"
}

is_ours() { grep -q 'The command k8e, written by install.sh' "$1" 2>/dev/null; }

# ---- Removing -------------------------------------------------------------------------------------------------------

# What a gateway keeps in its data folder; K8E itself has other things there.
data_parts='approvals.db* audit config.toml conversations.db* databases.* events exposures.db* gateway.log* guest images indexes.json
    keys.db* locales pods probe.json* probe.tmp python reserve* rootfs secrets* sessions.db* snapshots snapshots.db* templates templates.db*
    tls tokens.db* workspaces'
run_parts='checks container gateway.pid gateway.sock gvisor holder.* intents net sandboxes start.lock tether.* world'

# running: print KIND, UID, PID, run folder and data folder of every process that was started from $home, with $unit between
# them; where a process does not say which folders it has, they are empty.
running() {
    "$python" -I - "$home" <<'PYTHON'
import os, pathlib, sys

homes = tuple(path.rstrip("/") + "/" for path in (sys.argv[1], os.path.realpath(sys.argv[1])))
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        argv = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        uid = folder.stat().st_uid
    except OSError:
        continue
    if not argv[0].startswith(homes):
        continue
    try:
        raw = (folder / "environ").read_bytes().split(b"\0")
        environ = dict(item.split(b"=", 1) for item in raw if b"=" in item)
    except OSError:
        environ = {}
    kind = "gateway" if "gateway" in argv[1:] else "other"
    places = [environ.get(name, b"").decode() for name in (b"K8E_RUN_DIR", b"K8E_DATA_DIR")]
    print(kind, uid, folder.name, *places, sep="\x1f")
PYTHON
}

# installed_k8e ARGUMENTS: the command k8e of this installation, whatever is on PATH.
installed_k8e() { K8E_HOME=$home timeout 180 "$home/venv/bin/python" -I -m k8e "$@"; }

# find_folders: set run_dir, data_dir and client_dir to those of this user, if they are of this installation.
find_folders() {
    if [ "$(id -u)" = 0 ]; then
        run_dir=/run/k8e
        data_dir=/var/lib/k8e
    else
        run_dir=${XDG_RUNTIME_DIR:-/tmp/k8e-$(id -u)}/k8e
        data_dir=$HOME/.local/share/k8e/data
    fi
    client_dir=$HOME/.k8e
    # Another installation than the usual one has folders of its own, or those that are named.
    if [ "$home" != "$default_home" ]; then
        run_dir=
        data_dir=
        if [ -z "${K8E_DATA_DIR:-}" ]; then client_dir=; fi
    fi
    run_dir=${K8E_RUN_DIR:-$run_dir}
    data_dir=${K8E_DATA_DIR:-$data_dir}
}

stop_gateway() (
    export K8E_RUN_DIR="$1"
    if [ -n "$2" ]; then export K8E_DATA_DIR="$2"; fi
    installed_k8e gateway stop --destroy
)

# end_sandboxes RUN-FOLDER DATA-FOLDER: end the gateway of these folders, its sandboxes and what keeps them.
end_sandboxes() {
    [ -n "$1" ] || return 0
    if [ ! -S "$1/gateway.sock" ] && [ ! -e "$1/holder.json" ] && ! ls "$1"/sandboxes/sb-* >/dev/null 2>&1; then
        return 0
    fi
    end_sandboxes_many=$(find "$1/sandboxes" -maxdepth 1 -name 'sb-*' 2>/dev/null | wc -l)
    if ! stop_gateway "$1" "$2" >>"$log" 2>&1; then
        work_status=1 work_line=1
        fail "the gateway of $1 and its sandboxes could not be ended; nothing was removed" \
            "run install.sh again, so that k8e works, and then install.sh --uninstall"
    fi
    ended=$((ended + end_sandboxes_many))
}

# end_all: end every gateway and sandbox of this installation, or stop before anything is removed.
end_all() {
    ended=0
    find_folders
    end_sandboxes "$run_dir" "$data_dir"
    python=$(find_python sys) || return 0 # without one, nothing of k8e runs either
    running >"$work_dir/running"
    own_uid=$(id -u)
    while IFS=$unit read -r kind uid pid its_run_dir its_data_dir; do
        if [ "$kind" = gateway ] && [ "$uid" = "$own_uid" ]; then end_sandboxes "$its_run_dir" "$its_data_dir"; fi
    done <"$work_dir/running"
    if [ "$ended" = 1 ]; then note "ended 1 sandbox"; else note "ended $ended sandboxes"; fi
    left=$(running | head -n 10 | while IFS=$unit read -r kind uid pid its_run_dir its_data_dir; do
        printf ' %s of uid %s,' "$pid" "$uid"
    done)
    [ -z "$left" ] || fail "programs of $home still run (pid${left%,}); nothing was removed" \
        "as the user who started them: k8e gateway stop --destroy (with their K8E_RUN_DIR); then run this again"
}

# keeps FOLDER WHAT: say what stays, and how much it is.
keeps() {
    [ -n "$1" ] && [ -d "$1" ] || return 0
    stays=yes
    note "kept $1 ($(du -sh "$1" 2>/dev/null | cut -f 1)): $2"
}

# remove_parts FOLDER PARTS: remove what is ours in a folder, and the folder if nothing else is in it.
remove_parts() {
    [ -n "$1" ] && [ -d "$1" ] || return 0
    if grep -qF " $1/" /proc/self/mountinfo; then
        fail "something is still mounted below $1" "unmount it (see /proc/self/mountinfo), and run this again"
    fi
    # Word splitting makes the list; the shell expands the names in the folder alone.
    # shellcheck disable=SC2086
    (cd "$1" && rm -rf -- $2) || fail "cannot remove all of $1" "run as the user who owns it, or as root"
    if rmdir "$1" 2>/dev/null; then note "removed $1"; else note "removed what is ours in $1; other files are in it"; fi
}

# remove_published: remove the gateway's CA from where K8E's clients look. What K8E's own server wrote there stays.
remove_published() {
    for place in serving-kube-apiserver.crt sandbox-ca.crt; do
        if cmp -s "$data_dir/tls/ca.crt" "$data_dir/server/tls/$place"; then rm -f "$data_dir/server/tls/$place"; fi
    done
    for part in "$data_dir/server/tls" "$data_dir/server"; do rmdir "$part" 2>/dev/null || :; done
}

uninstall() {
    step_count=1
    step "Removing k8e"
    log=$(mktemp)
    work_dir=$(mktemp -d)
    if is_ours "$bin_dir/k8e-uninstall.sh"; then
        fail "this machine is a server or an agent of a cluster; nothing was removed" "run $bin_dir/k8e-uninstall.sh"
    fi
    end_all
    if [ "$purge" = yes ] && [ -n "$client_dir" ] && [ -d "$client_dir/agents" ]; then
        installed_k8e sandbox-install-skill all --uninstall >>"$log" 2>&1 ||
            warn "agents may still know k8e: see $client_dir/agents"
    fi
    for part in "$bin_dir/k8e" "$bin_dir"/k8e-sandbox*; do
        if [ ! -e "$part" ] || ! is_ours "$part"; then continue; fi
        rm -f "$part" || fail "cannot remove $part" "run as the user who installed it"
        note "removed $part"
    done
    for part in venv tools launcher.py install.sh install.log .install.lock bin/runsc bin/runc bin/crun \
        bin/.runsc.stamp bin/.runc.stamp bin/.crun.stamp; do
        if [ ! -e "$home/$part" ] && [ ! -L "$home/$part" ]; then continue; fi
        rm -rf "${home:?}/$part" || fail "cannot remove $home/$part" "run as the user who installed it"
        note "removed $home/$part"
    done
    for part in "$home/bin" "$home"; do
        if [ -d "$part" ] && ! rmdir "$part" 2>/dev/null; then note "kept $part: it holds other files"; fi
    done
    stays=no
    if [ "$purge" = yes ]; then
        remove_parts "$run_dir" "$run_parts"
        remove_published
        remove_parts "$data_dir" "$data_parts"
        remove_parts "$client_dir" "sandbox a2a agents"
        say "k8e and all that it kept is removed. Debian packages stay as they are."
        return
    fi
    keeps "$data_dir" "records of sessions, keys, snapshots, images, the audit trail"
    keeps "$run_dir" "locks of the gateway, gone with the next start of the machine"
    keeps "$client_dir" "logins, and what agents were told of k8e"
    say "k8e is removed. Debian packages stay as they are."
    if [ "$stays" = yes ]; then say "To remove what was kept, too: sh install.sh --purge"; fi
}

summary() {
    say ""
    if [ "$deps_only" = yes ]; then
        say "Everything that k8e runs on is in place:"
    else
        version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source_dir/src/k8e/_version.py")
        say "k8e $version is installed:"
        say "  command     $launcher"
        say "  packages    $venv"
    fi
    if [ -x "$home/bin/runsc" ]; then say "  gVisor      $(describe runsc)"; else say "  gVisor      none"; fi
    for program in runc crun; do
        if [ -x "$home/bin/$program" ]; then say "  $program        $(describe "$program")"; fi
    done
    if [ -d "$home/tools/node_modules/tsx" ]; then say "  TypeScript  tsx $tsx_version"; fi
    if [ "$deps_only" = no ]; then
        command=k8e
        case :$PATH: in
        *:"$bin_dir":*) ;;
        *)
            command=$launcher
            warn "$bin_dir is not on PATH. Add this line to ~/.profile:"
            # The user's shell expands it.
            # shellcheck disable=SC2016
            printf '        export PATH="%s:$PATH"\n' "$bin_dir" >&2
            ;;
        esac
        say ""
        say "Next: $command sandbox run --lang python \"print('hello')\""
    fi
}

# ---- Another source than this clone ---------------------------------------------------------------------------------

# refuse WHY WHAT-TO-DO: say it before there are steps.
refuse() {
    printf 'install.sh: %s\n  what to do: %s\n' "$1" "$2" >&2
    exit 1
}

download() {
    if have curl; then
        curl -fsSL --connect-timeout 10 -o "$2" "$1"
    elif have wget; then
        wget -q --timeout=30 -O "$2" "$1"
    elif python=$(find_python sys); then
        "$python" -I -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$1" "$2"
    else
        echo "there is no curl, wget or python3" >&2
        return 1
    fi
}

# unpack ARCHIVE: check the archive and unpack it; set other_source to the folder in it that has k8e.
unpack() {
    if [ -n "$checksum" ] && [ "$(sha256 "$1")" != "$checksum" ]; then
        refuse "$INSTALL_K8E_SOURCE has the checksum $(sha256 "$1"), not $checksum; nothing of it was used" \
            "check INSTALL_K8E_SOURCE_SHA256, and where the archive comes from"
    fi
    mkdir "$fetched/source"
    tar -xf "$1" -C "$fetched/source" --no-same-owner || refuse "$INSTALL_K8E_SOURCE is no archive that tar can read" \
        "name a .tar.gz of k8e, such as git archive makes"
    for other_source in "$fetched/source" "$fetched/source"/*; do
        [ ! -f "$other_source/pyproject.toml" ] || return 0
    done
    refuse "there is no k8e in $INSTALL_K8E_SOURCE" "name an archive of the whole source of k8e"
}

# install_other_source ARGUMENTS: run the install.sh of INSTALL_K8E_SOURCE, which fits that source.
install_other_source() {
    checksum=${INSTALL_K8E_SOURCE_SHA256:-}
    fetched=$(mktemp -d)
    trap 'rm -rf "$fetched"' EXIT
    case $INSTALL_K8E_SOURCE in
    http://* | https://*)
        [ -n "$checksum" ] || refuse "INSTALL_K8E_SOURCE is a URL, and INSTALL_K8E_SOURCE_SHA256 is not set" \
            "set it to the archive's SHA-256, which whoever publishes it tells"
        printf 'fetching %s\n' "$INSTALL_K8E_SOURCE" >&2
        download "$INSTALL_K8E_SOURCE" "$fetched/archive" || refuse "$INSTALL_K8E_SOURCE cannot be fetched" \
            "check the address and the network, then run this again"
        unpack "$fetched/archive"
        ;;
    *)
        if [ -d "$INSTALL_K8E_SOURCE" ]; then
            other_source=$(cd "$INSTALL_K8E_SOURCE" && pwd -P)
        elif [ -f "$INSTALL_K8E_SOURCE" ]; then
            unpack "$INSTALL_K8E_SOURCE"
        else
            refuse "there is no $INSTALL_K8E_SOURCE" "set INSTALL_K8E_SOURCE to a folder, an archive, or a URL"
        fi
        ;;
    esac
    [ -f "$other_source/install.sh" ] || refuse "there is no install.sh in $INSTALL_K8E_SOURCE" \
        "name the whole source of k8e"
    other_status=0
    # Not from our own input: this may be the rest of a script that sh reads from there.
    (unset INSTALL_K8E_SOURCE INSTALL_K8E_SOURCE_SHA256 && sh "$other_source/install.sh" "$@" </dev/null) ||
        other_status=$?
    exit "$other_status"
}

# ---- A server or an agent -------------------------------------------------------------------------------------------

# choose_role WORDS: set role and its flags from arguments, INSTALL_K8E_EXEC and K8E_URL.
choose_role() {
    case ${1:-} in
    server | agent)
        role=$1
        shift
        ;;
    *) if [ -n "${K8E_URL:-}" ]; then role=agent; elif [ $# -gt 0 ]; then role=server; fi ;;
    esac
    role_flags=$*
    network=all # what an agent needs is known when it has joined
    if [ "$role" = server ]; then
        network=cilium
        for choose_role_word in "$@"; do
            case $choose_role_word in
            --cni=*) network=${choose_role_word#--cni=} ;;
            *) if [ "${choose_role_last:-}" = --cni ]; then network=$choose_role_word; fi ;;
            esac
            choose_role_last=$choose_role_word
        done
    fi
    if [ -n "$role" ] && [ "$(id -u)" != 0 ]; then
        refuse "k8e $role needs root" "run this as root, for example: curl … | sudo INSTALL_K8E_EXEC=$role sh -"
    fi
}

# as_installed ARGUMENTS: the command that was just installed, with its own output; components take as long as they take.
as_installed() { K8E_HOME=$home K8E_BIN_DIR=$bin_dir "$venv/bin/python" -I -m k8e "$@" </dev/null 9>&-; }

install_role() {
    step "k8e $role"
    as_installed components install --cni "$network" >>"$log" ||
        fail "the programs of a cluster could not be installed" "see the error above, then run install.sh again"
    cp "$source_dir/install.sh" "$home/install.sh"
    write_if_changed "$bin_dir/k8e-uninstall.sh" "$(uninstall_script)"
    start=
    if [ "${INSTALL_K8E_SKIP_START:-}" = true ]; then start=--no-start; fi
    # Word splitting makes the flags, as it does for everybody who sets INSTALL_K8E_EXEC.
    # shellcheck disable=SC2086
    as_installed service install $start "$role" $role_flags >>"$log" ||
        fail "k8e $role did not start" "see the error above, and the logs in /var/lib/k8e/logs"
    note "it starts with the machine; k8e status tells how it is, k8e-uninstall.sh removes it"
}

uninstall_script() {
    cat <<SCRIPT
#!/bin/sh
# The command k8e, written by install.sh: its end. Removes k8e with its cluster, and all that they keep.
set -eu
if [ "\$(id -u)" != 0 ]; then
    echo "k8e-uninstall.sh: run it as root" >&2
    exit 1
fi
export K8E_HOME=$(quoted "$home") K8E_BIN_DIR=$(quoted "$bin_dir")
${K8E_COMPONENTS_DIR:+export K8E_COMPONENTS_DIR=$(quoted "${K8E_COMPONENTS_DIR:-}")}
k8e=\$K8E_BIN_DIR/k8e
components=\$("\$k8e" components list etcd --json | sed -n 's/.*"dir":"\\([^"]*\\)".*/\\1/p')
"\$k8e" service remove
"\$k8e" $role uninstall
if [ -f "\$components/manifest.json" ]; then find "\$components" -mindepth 1 -delete; fi
rmdir "\$components" "\$(dirname "\$components")" 2>/dev/null || : # others may have mounted it, or use what is above
rm -f "\$K8E_BIN_DIR/k8e-uninstall.sh"
exec sh "\$K8E_HOME/install.sh" --purge
SCRIPT
}

# ---- Main -----------------------------------------------------------------------------------------------------------

main() {
    umask 022
    if [ "$(id -u)" = 0 ]; then export HOME="${HOME:-/root}"; fi
    # Read from a pipe, the script is nowhere.
    if [ -f "$0" ]; then source_dir=$(cd "$(dirname "$0")" && pwd -P); else source_dir=/nowhere; fi
    if [ "$(id -u)" = 0 ]; then
        default_home=/opt/k8e
        default_bin_dir=/usr/local/bin
    else
        default_home=${HOME:?}/.local/share/k8e/home
        default_bin_dir=$HOME/.local/bin
    fi
    machine_home=/opt/k8e
    machine_owner=0
    home=${K8E_HOME:-$default_home}
    bin_dir=${K8E_BIN_DIR:-$default_bin_dir}
    case $home in /*) ;; *) home=$(pwd -P)/$home ;; esac
    case $bin_dir in /*) ;; *) bin_dir=$(pwd -P)/$bin_dir ;; esac

    quiet=no
    deps_only=no
    remove=no
    purge=no
    unit=$(printf '\037')
    terminal=no
    if [ -t 1 ]; then terminal=yes; fi
    apt_updated=no
    child=
    work_status=0
    go=
    log=
    work_dir=
    step_name=
    step_number=0
    step_count=6

    if [ -n "${INSTALL_K8E_SOURCE:-}" ]; then install_other_source "$@"; fi
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        -q | --quiet) quiet=yes ;;
        --deps-only)
            deps_only=yes
            step_count=5
            ;;
        --uninstall) remove=yes ;;
        --purge)
            remove=yes
            purge=yes
            ;;
        server | agent) break ;;
        *)
            printf 'install.sh: unknown argument: %s\n\n' "$1" >&2
            usage >&2
            exit 2
            ;;
        esac
        shift
    done
    role=
    if [ "$deps_only" = no ] && [ "$remove" = no ]; then
        # Word splitting makes the words.
        # shellcheck disable=SC2086
        if [ $# -gt 0 ]; then choose_role "$@"; else choose_role ${INSTALL_K8E_EXEC:-}; fi
    fi

    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP

    if [ "$remove" = yes ]; then
        uninstall
        exit 0
    fi
    [ -f "$source_dir/pyproject.toml" ] || refuse "there is no pyproject.toml beside it" \
        "run it from a git clone of k8e, or set INSTALL_K8E_SOURCE to a folder, an archive, or a URL"
    if [ -n "$role" ]; then step_count=7; fi
    check_machine
    system_packages
    install_gvisor
    install_runc
    install_tsx
    if [ "$deps_only" = no ]; then install_k8e; fi
    if [ -n "$role" ]; then install_role; fi
    summary
}

main "$@"
