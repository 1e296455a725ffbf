# SPDX-License-Identifier: Apache-2.0
"""An emulated machine with an RDMA device: a stock Debian kernel under QEMU, over this machine's own files.

The kernel and its modules come from Debian's package; soft RoCE (`rdma_rxe`) makes a network interface an
RDMA device that `libibverbs` cannot tell from a NIC. The guest sees the host's files under an overlay in
memory: the same Python and checkout as here, and of what it writes only $RESULTS comes back. The environment
has a disk of its own, as thousands of files are read from it to import torch: three times faster than 9p.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GUEST = Path(__file__).parent / "guest"
PACKAGES = (
    "qemu-system-x86",
    "busybox-static",
    "cpio",
    "e2fsprogs",
    "kmod",
    "iproute2",
    "ibverbs-providers",
    "libibverbs-dev",
    "libpci3",
    "libnuma1",
    "libdrm-amdgpu1",
    "g++",
)
"""What tests here need of Debian, its kernel aside."""
RESULTS = "/run/results"
"""Where the guest leaves what is to come back; $RESULTS there."""
_MODULES = (
    "virtio_pci", "virtio_blk", "ext4", "9pnet_virtio", "9p", "overlay", "dummy", "crc32_generic",
    "ib_uverbs", "rdma_ucm", "rdma_rxe",
)  # fmt: skip
_MARGIN_S = 120.0
"""From the limit of a job to the end of the machine: time to boot in."""
_PROCESSORS = 2
_KERNEL_ARGUMENTS = "console=ttyS0 quiet panic=-1 mitigations=off norandmaps tsc=reliable"
"""Emulated, every clock but the TSC is slow to read, and code is translated again where it lies elsewhere."""
_TIMED_OUT = 124


class MissingPackages(Exception):
    """Debian packages that are not installed; the message says how to install them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: `status` is 124 at its limit; `results` holds what it left in $RESULTS."""

    status: int
    wall_s: float
    results: Path


class Machine:
    """Boots once for every job. `folder` keeps the kernel from one time to the next.

    `environment`: the virtual environment that the guest gets as a disk.
    """

    def __init__(self, folder: Path, environment: Path, memory_mib: int = 5120) -> None:
        self._folder = folder
        self._environment = environment
        self._memory_mib = memory_mib

    def prepare(self) -> str:
        """Fetch the kernel, unless that was done, and copy the environment. Returns the kernel's version.

        Raises `MissingPackages`, or CalledProcessError when Debian's archive cannot be reached.
        """
        _check_packages()
        known = self._folder / "kernel"
        if not known.exists() or known.read_text().split()[1:] != list(_MODULES):
            self._folder.mkdir(parents=True, exist_ok=True)
            known.write_text(" ".join((self._fetch(), *_MODULES)))
        self._make_disk()
        return known.read_text().split()[0]

    def _make_disk(self) -> None:
        """A file system in a file: the environment, and room for what a file system needs besides."""
        kib = int(_output("du", "--summarize", "--block-size", "1024", str(self._environment)).split()[0])
        self._disk.unlink(missing_ok=True)
        subprocess.run(
            [
                "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-i", "8192", "-m", "0",
                "-d", self._environment, self._disk, f"{kib + kib // 4 + (1 << 18)}k",
            ],
            check=True,
        )  # fmt: skip

    @property
    def _disk(self) -> Path:
        return self._folder / "environment.ext4"

    def run(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        environment: Mapping[str, str],
        results: Path,
        say: Callable[[str], None],
    ) -> Outcome:
        """Boot, run a command in the working directory, and power off. `say` gets each line of the console.

        Several may run at once, in threads of their own.
        """
        results.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            image = self._pack_image(Path(scratch), _job(command, limit_s), environment)
            with subprocess.Popen(
                self._qemu(image, results),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as emulated:
                assert emulated.stdout is not None
                end = threading.Timer(limit_s + _MARGIN_S, emulated.kill)
                end.start()
                try:
                    for line in emulated.stdout:
                        say(line.rstrip())
                    ended_itself = emulated.wait() == 0
                finally:
                    end.cancel()
                    emulated.kill()
        if not ended_itself:
            return Outcome(_TIMED_OUT, time.monotonic() - begun, results)
        status = results / "status"
        code = int(status.read_text()) if status.exists() else 1  # it never came to the job
        return Outcome(code, time.monotonic() - begun, results)

    def _fetch(self) -> str:
        """Unpack the newest kernel that Debian's archive has, and keep what is needed of it."""
        listed = _output("apt-cache", "depends", "linux-image-amd64")
        package = next(word for word in listed.split() if word.startswith("linux-image-6"))
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
            [archive] = Path(scratch).glob("*.deb")
            root = Path(scratch) / "root"
            subprocess.run(["dpkg", "-x", archive, root], check=True)
            version = package.removeprefix("linux-image-")
            subprocess.run(["depmod", "-b", root, version], check=True)
            shutil.copy(root / "boot" / f"vmlinuz-{version}", self._folder / "vmlinuz")
            self._keep_modules(root, version)
        return version

    def _keep_modules(self, root: Path, version: str) -> None:
        """Copy the modules, and list them in an order in which they can be loaded."""
        modules = self._folder / "modules"
        shutil.rmtree(modules, ignore_errors=True)
        modules.mkdir()
        order: list[str] = []
        for name in _MODULES:
            wanted = _output(
                "modprobe", "--dirname", str(root), "--set-version", version, "--show-depends", name
            )
            for path in (Path(line.split()[1]) for line in wanted.splitlines() if line.startswith("insmod ")):
                if path.name not in order:
                    shutil.copy(path, modules)
                    order.append(path.name)
        (modules / "list").write_text("\n".join(order))

    def _pack_image(self, scratch: Path, job: str, environment: Mapping[str, str]) -> Path:
        """The first files that the kernel sees: busybox, modules, scripts, the job and its environment."""
        root = scratch / "root"
        shutil.copytree(self._folder / "modules", root / "modules")
        (root / "bin").mkdir()
        shutil.copy(shutil.which("busybox") or "busybox", root / "bin" / "busybox")
        for script in ("init", "prepare"):
            shutil.copy(GUEST / script, root / script)
        (root / "init").chmod(0o755)
        (root / "job").write_text(job)
        environment = {**environment, "PYTHON_ENVIRONMENT": str(self._environment)}
        exports = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
        (root / "environment").write_text("".join(exports))
        names = "\n".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))])
        packed = subprocess.run(
            ["cpio", "--quiet", "--create", "--format", "newc"],
            cwd=root, input=names.encode(), stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        image = scratch / "image"
        image.write_bytes(gzip.compress(packed.stdout, compresslevel=1))
        return image

    def _qemu(self, image: Path, results: Path) -> list[str]:
        shares = (("files", "/", "readonly=on,multidevs=remap,"), ("results", str(results), ""))
        return [
            "qemu-system-x86_64", "-machine", "q35", *_accelerator(), "-smp", str(_PROCESSORS),
            "-m", str(self._memory_mib), "-display", "none", "-serial", "stdio", "-monitor", "none",
            "-nic", "none", "-no-reboot",
            "-kernel", str(self._folder / "vmlinuz"), "-initrd", str(image),
            "-append", _KERNEL_ARGUMENTS,
            "-drive", f"file={self._disk},format=raw,if=virtio,readonly=on",
            *(word for tag, path, more in shares for word in (
                "-virtfs", f"local,{more}mount_tag={tag},security_model=none,path={path}")),
        ]  # fmt: skip


def _job(command: Sequence[str], limit_s: float) -> str:
    stop = f"timeout --kill-after 10 {limit_s:.0f}"
    return f"cd {shlex.quote(os.getcwd())}\n{stop} {shlex.join(command)}\n"


def _accelerator() -> list[str]:
    """The processor's own virtualization where there is one, else emulation, which is far slower."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    if {"vmx", "svm"} & set(flags.split()) and os.access("/dev/kvm", os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off"]


def _check_packages() -> None:
    """Install what is missing where we may, else raise `MissingPackages`."""
    missing = [name for name in PACKAGES if not _installed(name)]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise MissingPackages(f"sudo {shlex.join(install)}")
    print(f"installing {', '.join(missing)}", file=sys.stderr, flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(
        install,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )


def _installed(package: str) -> bool:
    asked = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}", package]
    return subprocess.run(asked, capture_output=True, text=True).stdout == "installed"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
