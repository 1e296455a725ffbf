# SPDX-License-Identifier: Apache-2.0
"""The Containerfiles: linted by hadolint, alike where they should be, and named as in the chart.

The one for CPUs is built and pushed by the page's commands, with `tests/standins/docker`. No test builds the
others.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deploy.chart import EXAMPLES, HADOLINT, ROOT
from tests.deploy.conftest import Docker
from tests.deploy.containers import Containers
from tests.deploy.pages import needing, scripts, steps
from tools.cuda_requirements import EXTRAS, VLLM, wanted

IMAGES = ROOT / "deploy" / "images"
NAMES = ("cpu", "cuda", "rocm")
LAYOUT = {"cpu": "kvferry", "cuda": "kvferry-cuda", "rocm": "kvferry-rocm"}
"""What the page and the chart's values call the images."""
# Debian's own versions are not pinned: its archive keeps the latest alone. `cd` is within one layer.
IGNORED = ("DL3008", "DL3003")
SOURCES = ("agent", "common", "deploy", "proxy", "transfer")
PINNED = re.compile(r"ARG BASE=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")


def instructions(name: str) -> list[str]:
    """The instructions of a Containerfile, one a line, without comments."""
    lines = (IMAGES / name / "Containerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return [re.sub(r"\s+", " ", each) for each in text.replace("\\\n", " ").splitlines() if each]


def last_stage(name: str) -> list[str]:
    found = instructions(name)
    [*_, start] = [position for position, each in enumerate(found) if each.startswith("FROM ")]
    return found[start:]


def test_no_other_images_are_there() -> None:
    assert {each.name for each in IMAGES.iterdir()} == set(NAMES) == LAYOUT.keys()


@pytest.mark.skipif(not HADOLINT.exists(), reason="no hadolint here: make test-deploy gets it")
@pytest.mark.parametrize("name", NAMES)
def test_hadolint_has_nothing_against_it(name: str) -> None:
    ignored = [word for each in IGNORED for word in ("--ignore", each)]
    done = subprocess.run(
        [HADOLINT, "--no-color", "--failure-threshold", "style", *ignored, IMAGES / name / "Containerfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_what_all_images_share(name: str) -> None:
    """One base by version and digest; nobody's user; doctor; and what a container runs."""
    first, *_ = instructions(name)
    assert PINNED.fullmatch(first), first
    starts = [each for each in instructions(name) if each.startswith("FROM ")]
    assert starts[:2] == ["FROM ${BASE} AS dependencies", "FROM dependencies AS package"]
    assert starts[2:] == ["FROM dependencies" if name == "rocm" else "FROM ${BASE}"]
    assert last_stage(name)[-5:] == [
        "USER 10001:10001",
        "WORKDIR /tmp",
        "RUN kvferry doctor",
        'ENTRYPOINT ["kvferry"]',
        'CMD ["--help"]',
    ]
    environment = " ".join(each for each in last_stage(name) if each.startswith("ENV "))
    assert "HOME=/tmp" in environment and "PYTHONDONTWRITEBYTECODE=1" in environment
    copied = {each for each in instructions(name) if each.startswith("COPY ")}
    assert copied >= {f"COPY {each} /src/{each}" for each in SOURCES}


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_the_sources_installs_no_dependency_again(name: str) -> None:
    """The stage of dependencies sees none of them; what follows it installs the package alone."""
    found = instructions(name)
    second = found.index("FROM dependencies AS package")
    before, after = found[:second], found[second:]
    assert any(" install --no-cache-dir" in each and " --requirement " in each for each in before)
    seen = {word for each in before if each.startswith("COPY ") for word in each.split()[1:-1]}
    assert seen <= {"constraints.txt", "pyproject.toml", "deploy/images/cuda/requirements.txt"}
    [installed] = [each for each in after if " install --no-cache-dir" in each]
    assert " --no-deps --root=/package " in installed
    # What is made of the sources is the last that is added to the image.
    added = [each for each in last_stage(name) if each.startswith(("RUN ", "COPY "))]
    assert added[-2].startswith("COPY --from=package /package/") and added[-1] == "RUN kvferry doctor"


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_declares_the_arguments_that_it_uses(name: str) -> None:
    """buildah gives a stage none of those of the stage that it begins with."""
    declared: set[str] = set()
    for each in instructions(name)[1:]:
        if each.startswith("FROM "):
            declared = set()
        elif each.startswith("ARG "):
            declared.add(each.removeprefix("ARG ").partition("=")[0])
        else:
            assert set(re.findall(r"\$\{([A-Z_]+)", each)) <= declared, each


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_those_on_debian_have_one_base_and_leave_no_pip(name: str) -> None:
    assert instructions(name)[:4] == instructions("cpu")[:4]
    assert "python3 -m venv --without-pip /opt/kvferry" in instructions(name)[2]
    copied = [each for each in last_stage(name) if each.startswith("COPY ")]
    assert copied == [
        "COPY --from=dependencies /opt/kvferry /opt/kvferry",
        "COPY --from=package /package/opt/kvferry /opt/kvferry",
    ]
    assert not any("pip" in each for each in last_stage(name))


def test_the_packages_beside_vllm_are_pinned_within_our_ranges() -> None:
    """`make cuda-requirements` writes the file."""
    lines = (IMAGES / "cuda" / "requirements.txt").read_text().splitlines()
    pinned = {}
    for line in lines:
        if not line.startswith("#"):
            found = re.fullmatch(r"([a-z0-9.-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}", line)
            assert found, line
            pinned[found[1]] = found[2]
    assert len(pinned) == sum(not line.startswith("#") for line in lines) > 150
    for each in map(Requirement, wanted()):
        assert each.specifier.contains(pinned[each.name.lower().replace("_", "-")]), each
    assert pinned["vllm"] == Requirement(VLLM).specifier.__str__().removeprefix("==")
    installed = re.findall(r"'/src\[([\w,]+)\]'", "\n".join(instructions("cuda")))
    assert installed == [",".join(EXTRAS)]


@pytest.mark.parametrize(
    ("name", "extras", "constraints"),
    [
        ("cpu", ("agent",), " --constraint /src/constraints.txt "),
        ("rocm", ("agent", "mori"), "grep -v '^torch==' /src/constraints.txt"),
    ],
)
def test_the_images_without_vllm_take_ci_s_versions(
    name: str, extras: tuple[str, ...], constraints: str
) -> None:
    """Of what these extras need, by pyproject.toml, which a line of Python reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]]
    needed = [*project["dependencies"], *(line for line in lines if not line.startswith("kvferry"))]
    [installing] = [each for each in instructions(name) if " --requirement " in each]
    [code] = re.findall(r"python3 -c '(import tomllib; [^']*)' > \S+/requirements.txt", installing)
    code = code.replace("/src/pyproject.toml", str(ROOT / "pyproject.toml"))
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout.splitlines() == needed
    assert any(constraints in each for each in instructions(name))


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_values_files_name_an_image_that_can_be_built(values: Path) -> None:
    """Values for GPUs name the image for them."""
    chosen = yaml.safe_load(values.read_text())
    repository = chosen.get("image", {}).get("repository", "kvferry").rpartition("/")[2]
    assert repository in LAYOUT.values()
    agents = chosen["agents"]
    if agents.get("engine") == "vllm":
        assert repository == LAYOUT["cuda"]
    if agents.get("transfer") == "mori":
        assert repository == LAYOUT["rocm"]


def test_the_page_names_each_image_and_its_containerfile() -> None:
    page = (ROOT / "docs" / "deploy" / "images.md").read_text()
    for name, image in LAYOUT.items():
        assert f"| `{image}` | `deploy/images/{name}/Containerfile` |" in page
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = [*steps("images.md", "Build"), *needing("images.md", "Build", "a registry of images")]
    for name, image in LAYOUT.items():
        file, tag = f"deploy/images/{name}/Containerfile", f"localhost/{image}:{version}"
        assert f"docker build --file {file} --tag {tag} ." in built


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of a registry of images, which podman takes without TLS by `registries.conf`."""
    if shutil.which("docker-registry") is None:
        pytest.skip("no docker-registry here: Debian's package has it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "images")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", tmp_path / "registry.yml"], stdout=log, stderr=log
        )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.timeout(3600)  # the image may have to be built
def test_the_commands_of_the_page_build_an_image_and_push_it(
    containers: Containers, docker: Docker, registry: str, tmp_path: Path
) -> None:
    """As they stand, but for the registry's address."""

    def identity(image: str) -> str:
        return containers.podman("image", "inspect", "--format", "{{.Id}}", image)

    settings = str(tmp_path / "registries.conf")
    build, push = scripts("images.md", "Build")
    docker.type(build)
    pushed = f"{registry}/kvferry:0.2.0"
    docker.type(push.replace("registry.example", registry), CONTAINERS_REGISTRIES_CONF=settings)
    docker.type(f"docker rmi {pushed}")
    docker.type(f"docker pull {pushed}", CONTAINERS_REGISTRIES_CONF=settings)
    try:
        assert identity(pushed) == identity("localhost/kvferry:0.2.0")
    finally:
        docker.type(f"docker rmi {pushed}")
