# SPDX-License-Identifier: Apache-2.0
"""The image for CPUs is built, and the chart's own Pods run in podman with the bundled model.

`pods` says what stands in for a cluster. `make test-deploy` gets Helm; without it, without root, or without
Debian's packages for containers, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.deploy.chart import CHART, HELM, render
from tests.deploy.conftest import FOLDER
from tests.deploy.containers import Containers
from tests.deploy.image import IMAGE, build, copy_of_the_repository
from tests.deploy.pods import NETWORK, Pod, Pods
from tests.helpers.client import complete, session
from tests.helpers.waiting import patient

PROMPT, ANSWER = "417+52=", "469"
BODY = {"model": "ferry-tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
LARGEST_BYTES = 1_200_000_000
BUILD_TOOLS = ("pip", "pip3", "gcc", "cc", "make", "ld")
# Asks by the name of the Service alone, and prints its addresses, then each event of the stream.
CLIENT = """
import json, socket, sys, urllib.request
host, port, body = sys.argv[1:]
print(json.dumps(sorted({each[4][0] for each in socket.getaddrinfo(host, port)})))
request = urllib.request.Request(f"http://{host}:{port}/v1/completions", body.encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=60) as response:
    for line in response:
        if line.startswith(b"data: "):
            print(line[6:].decode().strip())
"""  # noqa: E501

pytestmark = [
    pytest.mark.skipif(not HELM.exists(), reason="no Helm here: make test-deploy gets it"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def objects(image: str) -> list[dict[str, Any]]:
    """The release of the CPU demo, from the image that was built."""
    repository, tag = image.rsplit(":", 1)
    values = CHART / "examples" / "cpu-demo.yaml"
    return render("--values", values, "--set", f"image.repository={repository},image.tag={tag}")


@pytest.fixture
def pods(containers: Containers, tmp_path: Path) -> Iterator[Pods]:
    running = Pods(containers, tmp_path)
    yield running
    running.end()


def test_the_image_is_small_and_holds_no_build_tools(containers: Containers, image: str) -> None:
    assert about(containers, image)["Size"] < LARGEST_BYTES
    assert about(containers, image)["User"] == "10001:10001"
    code = f"import shutil; print([each for each in {BUILD_TOOLS} if shutil.which(each)])"
    assert inside(containers, "python", "-c", code) == "[]\n"


def test_doctor_finds_a_transfer_on_a_read_only_root(containers: Containers, image: str) -> None:
    said = inside(containers, "kvferry", "doctor")
    assert "tcp" in said


def test_another_source_leaves_the_layer_of_the_dependencies(
    containers: Containers, image: str, tmp_path: Path
) -> None:
    """It is most of the image: to build, push and pull one anew takes seconds."""
    repository = copy_of_the_repository(tmp_path)
    with (repository / "proxy" / "ids.py").open("a") as source:
        source.write("# another one\n")
    other = build(containers, FOLDER, repository=repository, name="localhost/kvferry:other")
    try:
        layers, new = (about(containers, each)["RootFS"]["Layers"] for each in (image, other))
        assert (
            new[:-2] == layers[:-2] and len(new) == len(layers) > 2
        )  # but the package, and what doctor left
        assert new[-2] != layers[-2]
    finally:
        containers.podman("rmi", other)


async def test_a_request_streams_through_the_chart_s_pods_by_the_name_of_the_service(
    containers: Containers, pods: Pods, objects: list[dict[str, Any]]
) -> None:
    running = pods.start(objects)
    agents = [each for each in running if each.name in ("r-kvferry-prefill-0", "r-kvferry-decode-0")]
    proxies = [each for each in running if each.name in ("r-kvferry-proxy-0", "r-kvferry-proxy-1")]
    assert len(agents) == len(proxies) == 2 and len(running) == 4
    async with session() as http:
        await asyncio.gather(*(answers(http, each, "readinessProbe") for each in running))
        await asyncio.gather(*(answers(http, each, "livenessProbe") for each in running))
        for proxy in proxies:
            await knows_ready_agents(http, f"http://{proxy.address}:10001", len(agents))
            answer = await complete(http, f"http://{proxy.address}:10001", {**BODY, "stream": True})
            assert answer.choices[0].text == ANSWER
            assert answer.timing["pull_bytes"] and answer.timing["backend"] == "tcp"
    asked = ["r-kvferry", "10001", json.dumps({**BODY, "stream": True})]
    addresses, *events, last = (
        inside(containers, "python", "-c", CLIENT, *asked, network=NETWORK).strip().splitlines()
    )
    assert json.loads(addresses) == sorted(each.address for each in proxies)
    assert last == "[DONE]"
    assert len(events) >= len(ANSWER)
    assert "".join(choice["text"] for each in events for choice in json.loads(each)["choices"]) == ANSWER
    for pod in [*proxies, *agents]:
        assert pods.stop(pod) == [0], pods.logs(pod)  # drained, and not killed


async def knows_ready_agents(http: aiohttp.ClientSession, proxy: str, count: int) -> None:
    """Wait until a proxy knows that many agents as ready: they find it by the headless Service."""
    async with asyncio.timeout(patient(10.0)):
        while True:
            async with http.get(f"{proxy}/nodes") as response:
                states = [node["state"] for node in (await response.json())["nodes"]]
            if states == ["ready"] * count:
                return
            await asyncio.sleep(0.1)


def about(containers: Containers, image: str) -> dict[str, Any]:
    """What podman says of an image."""
    [found] = json.loads(containers.podman("image", "inspect", image))
    assert isinstance(found, dict)
    return found


def inside(containers: Containers, command: str, *words: str, network: str = "none") -> str:
    """What a command says in a container like the chart's: a read-only root, and no rights."""
    rights = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
    return containers.podman(
        "run", "--rm", *rights, "--network", network, "--entrypoint", command, IMAGE, *words
    )


async def answers(http: aiohttp.ClientSession, pod: Pod, probe: str) -> None:
    """Returns once the Pod's probe is answered with 200."""
    async with asyncio.timeout(patient(180)):
        while True:
            try:
                async with http.get(pod.probes[probe]) as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.5)
