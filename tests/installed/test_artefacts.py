# SPDX-License-Identifier: Apache-2.0
"""The other files of `make release`: each says what it should, and those that are not Python's load."""

from __future__ import annotations

import hashlib
import json
import tarfile

import pytest
import yaml

from tests.deploy.chart import helm
from tests.deploy.containers import Containers
from tests.installed.conftest import PYTHON, RELEASE, provenance, version_text
from tests.unit.test_packages import PROJECT, declared, normalized

VERSION = PROJECT["version"]
IMAGE = f"localhost/kvferry:{VERSION}"
pytestmark = [
    pytest.mark.installed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="needs a release: see `make test-installed`"),
]


def test_the_provenance_names_every_file_with_its_checksum() -> None:
    named = {each["name"]: each["digest"]["sha256"] for each in provenance()["subject"]}
    apart = {"SHA256SUMS", f"kvferry-{VERSION}.provenance.json"}
    there = {path.name: path for path in RELEASE.iterdir() if path.name not in apart}
    assert named == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()}


@pytest.mark.parametrize("suffix", ["", "-cpu"])
def test_an_sbom_has_all_that_agents_require(suffix: str) -> None:
    path = RELEASE / f"kvferry-{VERSION}{suffix}.cdx.json"
    if not path.exists():
        pytest.skip("the release has no image")
    sbom = json.loads(path.read_text())
    about = sbom["metadata"]["component"]
    assert (about["name"], about["version"]) == ("kvferry", VERSION)
    purls = {each["purl"] for each in sbom["components"]}
    python = {normalized(purl.removeprefix("pkg:pypi/")) for purl in purls if purl.startswith("pkg:pypi/")}
    assert declared(["agent"]) <= python and "pytest" not in python
    debian = {purl for purl in purls if purl.startswith("pkg:deb/debian/python3.11@")}
    assert bool(debian) is bool(suffix)
    assert "file:" not in path.read_text()


def test_the_sdist_has_no_tests() -> None:
    with tarfile.open(RELEASE / f"kvferry-{VERSION}.tar.gz") as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
        assert tops == {
            *("agent", "common", "deploy", "proxy", "transfer", "kvferry.egg-info"),
            *("LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"),
        }


def test_the_chart_renders_with_the_dashboards() -> None:
    chart = RELEASE / f"kvferry-{VERSION}.tgz"
    monitored = ("--set", "monitoring.dashboard=true", "--set", "security.insecure=true")
    done = helm("template", "r", chart, *monitored)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert f"kvferry:{VERSION}" in done.stdout
    assert any("kvferry-fleet.json" in each.get("data", {}) for each in objects)


def test_the_image_loads_and_runs(containers: Containers) -> None:
    """Its build has run `kvferry doctor`."""
    archive = RELEASE / f"kvferry-{VERSION}-cpu.oci.tar"
    if not archive.exists():
        pytest.skip("the release has no image")
    containers.podman("load", "--input", archive, timeout_s=240)
    printed = containers.podman("run", "--rm", "--network", "none", IMAGE, "--version")
    assert printed.startswith(version_text())
