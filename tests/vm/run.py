"""Boots a Debian kernel with nothing but cgroup v2 in QEMU and tries k8e's limits there.

``make test-vm``. This machine's own files are the VM's, shared read-only below an overlay in
memory, so what is tried is what is installed here. Exit status 0: all passed, or skipped with a
reason.
Arguments choose scenarios, runtimes and behaviours (``run.py user container limits.pids``); none
means all.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import scenarios

from k8e import settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "vm"
"""Kernel and busybox, unpacked, and the last console; ``make clean`` removes them."""
QEMU = "qemu-system-x86_64"
KERNEL = "linux-image-amd64"  # the smaller -cloud- kernel has no 9p
MODULES = "virtio_pci virtio_blk 9pnet_virtio 9p overlay loop ext4 crc32c_generic".split()
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS = float(os.environ.get("K8E_VM_SECONDS", "1500"))
"""For everything; some 700 on two free cores, by the times of its parts."""
ACCELERATOR = os.environ.get("K8E_VM_ACCEL", "tcg,thread=multi")
"""Emulation works everywhere; ``kvm`` is quick where it works."""
PATIENCE = "5" if ACCELERATOR.startswith("tcg") else "1"
"""How much longer every time-out is: starting gVisor takes up to 45 s on an emulated CPU."""
CHOSEN = [name for name in scenarios.ALL if name in sys.argv[1:]] or list(scenarios.ALL)
WORDS = [word for word in sys.argv[1:] if word not in scenarios.ALL]
MEMORY = "3G"
DISK = 8 << 30  # sparse


def skip(reason: str) -> NoReturn:
    print(f"skipped: {reason}")
    sys.exit(0)


def run(*argv: str, cwd: str | None = None) -> str:
    """What a program printed; what it said on an error, as a RuntimeError."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{PATH}"}
    environment["DEBIAN_FRONTEND"] = "noninteractive"
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=environment, capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise RuntimeError(f"{argv[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip().splitlines() or ["no output"]
        raise RuntimeError(f"{' '.join(argv[:2])}: {said[-1]}") from None
    return done.stdout


def find_qemu() -> str:
    """The emulator; installs it where that is possible."""
    found = shutil.which(QEMU)
    if found is None and os.geteuid() == 0:
        print("installing qemu-system-x86", flush=True)
        try:
            run("apt-get", "install", "-y", "--no-install-recommends", "qemu-system-x86")
        except RuntimeError as error:
            skip(f"qemu-system-x86 cannot be installed: {error}")
        found = shutil.which(QEMU)
    return found or skip(f"no {QEMU}; install the package qemu-system-x86")


def unpack(package: str) -> Path:
    """The files of a Debian package, in the cache; the system itself stays as it is."""
    folder = CACHE / package
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        try:
            run("apt-get", "download", package, cwd=scratch)
            run("dpkg", "-x", next(Path(scratch).glob("*.deb")).name, "files", cwd=scratch)
        except RuntimeError as error:
            skip(f"the package {package} cannot be had: {error}")
        (Path(scratch) / "files").rename(folder)
    return folder


def kernel_package() -> str:
    """The package with the newest kernel; ``linux-image-amd64`` only names it."""
    try:
        told = run("apt-cache", "depends", KERNEL)
    except RuntimeError as error:
        skip(f"no Debian package sources, hence no kernel: {error}")
    names = re.findall(r"Depends: (linux-image-\S+)", told)
    return names[0] if names else skip(f"no package {KERNEL}; apt-get update may help")


def modules(folder: Path) -> dict[str, bytes]:
    """The modules that are needed, each after those that it depends on."""
    files = {path.name.split(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        file = files.get(name.replace("-", "_"))
        if name in found or file is None:  # what has no file is built in
            return
        data = file.read_bytes()
        if file.suffix == ".xz":
            data = lzma.decompress(data)
        needs = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in needs[1].decode().split(",") if needs else []:
            add(other)
        found[name] = data

    for name in MODULES:
        add(name)
    return found


def archive(files: dict[str, bytes]) -> bytes:
    """An initramfs: a ``newc`` archive of executable files."""
    out = io.BytesIO()
    folders = sorted({str(parent) for name in files for parent in Path(name).parents} - {"."})
    entries = [(name, 0o040755, b"") for name in folders]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields))
        out.write(name.encode() + b"\0")
        out.write(bytes(-out.tell() % 4))
        out.write(data)
        out.write(bytes(-out.tell() % 4))
    return out.getvalue()


def initramfs(kernel: Path, busybox: Path) -> bytes:
    needed = modules(kernel / "lib" / "modules")
    environment = {
        "PATH": PATH,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), sysconfig.get_path("platlib")]),
        "K8E_HOME": str(settings.load().home),
        "K8E_DATA_DIR": "/var/lib/k8e",
        "K8E_RUN_DIR": "/run/k8e",
        "K8E_ALLOWED_HOSTS": "none",
        "K8E_VM_PATIENCE": PATIENCE,
    }
    needs = [HERE, Path(sysconfig.get_path("platlib")), settings.load().home]
    start = scenarios.script(
        CHOSEN,
        environment=" ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items()),
        program=shlex.join([os.path.realpath(sys.executable), "-B", str(HERE / "inside.py")]),
        words=shlex.join(WORDS),
        way=shlex.join(sorted({str(path) for need in needs for path in (need, *need.parents)})),
    )
    files = {
        "init": scenarios.INIT.format(modules=" ".join(needed)).encode(),
        "start": start.encode(),
        "bin/busybox": (busybox / "bin" / "busybox").read_bytes(),
    }
    return archive(files | {f"modules/{name}.ko": data for name, data in needed.items()})


def command(qemu: str, kernel: Path, scratch: Path) -> list[str]:
    image = next((kernel / "boot").glob("vmlinuz-*"))
    words = f"""
    -accel {ACCELERATOR} -cpu max -smp 2 -m {MEMORY} -nodefaults -display none -no-reboot -nic none
    -append 'console=ttyS0 panic=-1'
    -serial file:console -serial stdio
    -drive file=disk,format=raw,if=virtio,cache=unsafe
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap
    -kernel {shlex.quote(str(image))} -initrd initramfs
    """
    return ["nice", "-n", "10", qemu, *shlex.split(words)]


def boot(argv: list[str], scratch: Path) -> list[dict[str, Any]]:
    """Run the VM to its end, or to the end of the time; what it said."""
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(
        argv, cwd=scratch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            for raw in process.stdout:
                try:
                    line: dict[str, Any] = json.loads(raw)
                except ValueError:
                    print(raw.decode(errors="replace").rstrip())
                    continue
                lines.append(line)
                seconds = f" [{line['seconds']} s]" if "seconds" in line else ""
                print(f"{line['verdict']:16}{line['name']}{seconds}  {line['detail']}", flush=True)
        finally:
            timer.cancel()
            process.kill()
    return lines


def judge(lines: list[dict[str, Any]], took: float) -> int:
    failed = [line["name"] for line in lines if line["verdict"] == "fail"]
    passed = sum(line["verdict"] == "pass" for line in lines)
    print(f"{passed} passed, {len(failed)} failed in {took:.0f} s", *failed, sep="\n  ")
    ended = [line["name"] for line in lines if line["kind"] == "end"]
    complete = ended == [f"{name}: came to its end" for name in CHOSEN]
    if not complete:
        print(f"the VM did not come to its end; it may take {SECONDS:g} s (K8E_VM_SECONDS)")
    if failed or not complete:
        print(f"its console is in {CACHE.relative_to(ROOT)}/console")
    return 1 if failed or not complete else 0


def on_terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave in an orderly way, so that QEMU and the scratch files go, too."""
    sys.exit(128 + number)


def main() -> int:
    if platform.machine() != "x86_64":
        skip(f"only written for x86_64, and this machine is {platform.machine()}")
    CACHE.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, on_terminate)
    qemu = find_qemu()
    kernel, busybox = unpack(kernel_package()), unpack("busybox-static")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="k8e-vm-") as name:
        scratch = Path(name)
        (scratch / "initramfs").write_bytes(initramfs(kernel, busybox))
        with open(scratch / "disk", "wb") as file:
            file.truncate(DISK)
        run("mkfs.ext4", "-q", "-F", str(scratch / "disk"))
        print(f"booting {kernel.name} ({ACCELERATOR}), at most {SECONDS:g} s", flush=True)
        lines = boot(command(qemu, kernel, scratch), scratch)
        if (scratch / "console").exists():
            shutil.copy(scratch / "console", CACHE / "console")
    return judge(lines, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
