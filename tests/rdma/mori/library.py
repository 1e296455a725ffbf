# SPDX-License-Identifier: Apache-2.0
"""AMD's MORI-IO for the Python of this checkout: the published wheel's C++ library, under a binding of ours.

The wheel is that for Python 3.10, and for machines with ROCm: that for Python 3.12 needs a newer glibc than
Debian 12 has. Its library is used as it is, byte for byte; what it links against and a machine without GPUs
lacks (HIP, HSA, ROCm SMI) is made here: libraries that say that there is no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from pathlib import Path

VERSION = "1.2.4"
HERE = Path(__file__).parent
_PYTHON_OF_WHEEL = "3.10"
_LIBRARIES = ("libmori_application.so", "libmori_io.so")
_MODULES = (
    "__init__.py",
    "_version.py",
    "cpp/__init__.py",
    "io/__init__.py",
    "io/engine.py",
    "io/fabric_allocator.py",
)
_NO_DEVICE = 100
"""hipErrorNoDevice"""
_HSA_ERROR = 0x1000
"""HSA_STATUS_ERROR"""
_ABSENT = {"libamdhip64.so.7": _NO_DEVICE, "libhsa-runtime64.so.1": _HSA_ERROR}
"""What the library links against, and what every function of it returns here."""
_COUNTING = ("hipGetDeviceCount", "hipGetDevice")
_NAMING = ("hipGetErrorString", "hipGetErrorName")
_LOADED = ("__hipRegisterFatBinary", "__hipUnregisterFatBinary", "__hipRegisterFunction", "__hipRegisterVar")
"""Called when the library is loaded; returns nothing, or a place for a handle."""


class MoriLibrary:
    """`package` goes on PYTHONPATH, `rocm` on LD_LIBRARY_PATH."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.rocm = folder / "rocm"
        self._folder = folder

    def make(self) -> None:
        """Fetch the wheel and build what is missing, unless that was done. About a minute of one core."""
        done = self._folder / f"done-{VERSION}-{self.package.name}"
        if done.exists():
            return
        wheel = self._fetch()
        self._make_rocm(wheel)
        self._bind(wheel)
        done.touch()

    def _fetch(self) -> Path:
        """The unpacked wheel's package `mori`."""
        unpacked = self._folder / "wheel"
        if not unpacked.exists():
            _run(
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                "--python-version", _PYTHON_OF_WHEEL, f"amd-mori=={VERSION}", "--dest", str(self._folder),
            )  # fmt: skip
            [archive] = self._folder.glob(f"amd_mori-{VERSION}-*.whl")
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(unpacked)
        return unpacked / "mori"

    def _make_rocm(self, wheel: Path) -> None:
        """A library for each of `_ABSENT`: the functions that are missing, under the versions asked for."""
        self.rocm.mkdir(exist_ok=True)
        for name, result in _ABSENT.items():
            source, versions = self.rocm / f"{name}.c", self.rocm / f"{name}.map"
            wanted = _missing_functions([wheel / each for each in _LIBRARIES], name)
            source.write_text(
                "\n".join(_function(each, result) for each in sorted(set().union(*wanted.values())))
            )
            versions.write_text(
                "\n".join(
                    f"{version} {{ {'; '.join(sorted(names))}; }};"
                    for version, names in sorted(wanted.items())
                )
            )
            self._compile_c(source, name, f"-Wl,--version-script={versions}")
        self._compile_c(HERE / "rocm_smi.c", "librocm_smi64.so.1")

    def _compile_c(self, source: Path, name: str, *flags: str) -> None:
        _run(
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-fno-builtin",
            f"-Wl,-soname,{name}",
            *flags,
            "-o",
            str(self.rocm / name),
            str(source),
        )

    def _bind(self, wheel: Path) -> None:
        """The package: the wheel's C++ libraries and Python files, and our extension module."""
        package = self.package / "mori"
        for name in (*_LIBRARIES, *_MODULES):
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel / name, package / name)
        import pybind11

        sources = wheel / "_jit-sources"
        includes = (
            HERE / "include", sources / "include", sources / "3rdparty/msgpack-c/include",
            sources / "3rdparty/spdlog/include", pybind11.get_include(), sysconfig.get_path("include"),
        )  # fmt: skip
        _run(
            "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=default", "-DMSGPACK_NO_BOOST",
            *(f"-I{each}" for each in includes), str(HERE / "binding.cpp"),
            f"-L{package}", "-lmori_io", "-lmori_application", "-Wl,-rpath,$ORIGIN",
            "-Wl,--allow-shlib-undefined", "-o", str(package / "libmori_pybinds.so"),
        )  # fmt: skip


def _missing_functions(libraries: list[Path], absent: str) -> dict[str, set[str]]:
    """What these libraries ask of one that is absent: by symbol version, the names."""
    found: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        needed = _output("readelf", "--version-info", "--wide", str(library))
        # "Version needs": a line that names the file, then one line for each version that is asked of it.
        versions, inside = set(), False
        for line in needed.splitlines():
            if named := re.search(r"File: (\S+)", line):
                inside = named[1] == absent
            elif inside and (asked := re.search(r"Name: (\S+)", line)):
                versions.add(asked[1])
        for line in _output("nm", "--dynamic", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in versions:
                found[version].add(name)
    return found


def _function(name: str, result: int) -> str:
    """A C function of that name that says that there is no device."""
    if name in _COUNTING:
        return f"int {name}(int *count) {{ *count = 0; return {result}; }}"
    if name in _NAMING:
        return f'const char *{name}(int error) {{ return "no device: this is no ROCm"; }}'
    if name in _LOADED:
        return f"static void *of_{name}[4]; void *{name}(void) {{ return of_{name}; }}"
    return f"long {name}(void) {{ return {0 if name == 'hipGetLastError' else result}; }}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
