# SPDX-License-Identifier: Apache-2.0
"""What users mistype or have not set up: each mistake ends with one line that says what would be right."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.deploy.cli import main

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
MODEL = "--model ferry-tiny"

# Command, exit status, and what the line says. {folder} holds: bad.yml with a misspelt setting, wrong.yml
# with a value that is none, torn.yml, which is no YAML, fleet.yml with a misspelt option of a role, junk,
# which is no key, keys, of clients alone, pair, of two keys, latin, which is no UTF-8, open.key, which all
# can read.
MISTAKES = [
    ("prox", 2, "kvferry: unknown command 'prox'; did you mean proxy?"),
    ("deploy", 2, "unknown command 'deploy'; choose from serve, up, proxy, agent, status, "),
    # Names.
    ("proxy --prt 1", 2, "--prt: no such option; did you mean --port?"),
    ("proxy --por 1", 2, "--por: no such option; did you mean --port?"),
    ("agent --modle ferry-tiny", 2, "--modle: no such option; did you mean --model?"),
    ("agent --prefix_cache false", 2, "--prefix_cache: no such option; did you mean --prefix-cache?"),
    ("up --prefil 2", 2, "--prefil: no such option; did you mean --prefill?"),
    ("agent --attach http://a:1 --dialct atom", 2, "--dialct: no such option; did you mean --dialect?"),
    ("proxy extra", 2, "'extra': every option begins with two dashes"),
    ("proxy -p 7", 2, "'-p 7': every option begins with two dashes"),
    ("up --model no", 2, "'no' is no directory, no bundled model (ferry-tiny)"),
    ("up --agent.lease-s 0", 2, "--lease-s must be greater than 0"),
    ("up --decode.lase-s 5", 2, "--decode.lase-s: no such option; did you mean --decode.lease-s?"),
    ("up --proxy.prt 1", 2, "--proxy.prt: no such option; did you mean --proxy.port?"),
    ("up --proxy.api-keys {folder}/keys", 2, "/keys has no admin's key, which the list of agents needs"),
    ("up --prefill.port 8000", 2, "--prefill.port: kvferry up chooses this"),
    ("up --engine vlm", 2, "--engine: 'vlm' is not one of kvferry, vllm, sglang, auto; did you mean vllm?"),
    ("up --vllm.dtype half", 2, "--vllm.dtype: no vLLM server is started, as --engine vllm does"),
    ("up --agent.engine vllm", 2, "--agent.engine: kvferry up chooses this"),
    ("up --engine vllm --engine-python {folder}/none", 1, "{folder}/none is no Python that runs: "),
    ("up --engine auto --on ray", 2, "--engine must be named with --on ray"),
    ("agent --engine vlm --model m", 2, "--engine: 'vlm' is not one of kvferry, vllm, sglang, auto; did "),
    ("agent --engine vllm --model m --kv-blocks 5", 2, "--kv-blocks: no such option"),
    ("up --prefill none", 2, "--prefill: 'none' is not a whole number"),
    ("up --prefill 0", 2, "--prefill must be at least 1 where --both is 0, got 0"),
    ("up --both.lease-s 5", 2, "--both.lease-s: no agent of this role is started"),
    ("up --config none.yaml", 2, "--config: 'none.yaml': No such file or directory"),
    ("up --config", 2, "--config: its value is missing, a file"),
    ("up --config {folder}/torn.yml", 2, "torn.yml' is not YAML: expected the node content, but found"),
    ("proxy --nodes {folder}/torn.yml", 1, "torn.yml' is not YAML: expected the node content, but found"),
    ("proxy --config {folder}/tab.yml", 2, "tab.yml' is not YAML: found character '\\t' that cannot start"),
    ("proxy --config {folder}/bell.yml", 2, "bell.yml' is not YAML: it has the character "),
    ("up --config {folder}/bad.yml", 2, "--config: no such setting 'prt'; did you mean port?"),
    ("up --config {folder}/fleet.yml", 2, "--config: no such setting 'decode.lase-s'; did you mean lease-s?"),
    ("up --config {folder}/chosen.yml", 2, "--config: agent.port: kvferry up chooses this"),
    ("serve no", 2, "'no' is no directory, no bundled model (ferry-tiny)"),
    ("serve --prot 1", 2, "kvferry serve: --prot: no such option; did you mean --port?"),
    ("status http://127.0.0.1:9", 1, "http://127.0.0.1:9 cannot be reached: Connection refused"),
    ("status http://a..b:1", 2, "URL: 'http://a..b:1' is not http://HOST:PORT or https://HOST:PORT"),
    ("status --watch --json", 2, "--json: not allowed with argument --watch"),
    ("status --jsn", 2, "--jsn: no such option; did you mean --json?"),
    ("status --on rya", 2, "--on: 'rya' is not one of local, ray; did you mean ray?"),
    ("status localhost:10001", 2, "URL: 'localhost:10001' is not http://HOST:PORT or https://HOST:PORT"),
    ("status --key {folder}/none", 2, "--key: '{folder}/none': no such file"),
    ("status --key {folder}/pair", 2, "--key: '{folder}/pair' holds no key, which is one line of printable"),
    ("doctor --key {folder}/pair", 2, "--key: '{folder}/pair' holds no key, which is one line of printable"),
    ("status --key {folder}", 2, "--key: {folder}: Is a directory"),
    ("status --ca {folder}/junk", 1, "{folder}/junk is no certificate: "),
    ("completion", 2, "the following arguments are required: SHELL"),
    ("completion tcsh", 2, "SHELL: 'tcsh' is not one of bash, zsh, fish"),
    ("keygen a b", 2, "unrecognized arguments: b"),
    ("keygen", 2, "the following arguments are required: FILE"),
    ("drain", 2, "the following arguments are required: URL"),
    ("drain http://127.0.0.1:9 --timeout-s soon", 2, "--timeout-s: 'soon' is not a number"),
    ("doctor --nope", 2, "--nope: no such option"),
    # Loads.
    ("bench http://127.0.0.1:9", 1, "http://127.0.0.1:9/v1/models cannot be reached: Connection r"),
    ("bench --rat 1", 2, "--rat: no such option; did you mean --rate?"),
    ("bench localhost:10001", 2, "--server must be http://HOST:PORT or NAME=http://HOST:PORT, got 'local"),
    ("bench http://a:1 http://a:1/v1", 2, "--server: two servers have the same name; give others as "),
    ("bench --rate 1 --concurrency 2", 2, "--rate, --concurrency and --trace exclude each other"),
    ("bench --rate fast", 2, "--rate must be numbers greater than 0 with commas between, got 'fast'"),
    ("bench --concurrency 1.5", 2, "--concurrency must be whole numbers greater than 0 with commas between"),
    ("bench --prompt-tokens 9:3", 2, "--prompt-tokens must be N, LOW:HIGH or several of these with commas"),
    ("bench --rounds 0", 2, "--rounds must be at least 1, got 0"),
    ("bench --ttft-ms 0", 2, "--ttft-ms must be greater than 0, got 0.0"),
    ("bench --json {folder}/none/r.json", 2, "cannot be written: no such folder, or it is one"),
    ("bench --plot chart.gif", 2, "--plot must end with .png, .svg, .pdf, got 'chart.gif'"),
    ("bench --key {folder}/none", 2, "--key: '{folder}/none': no such file"),
    ("bench --key {folder}/pair", 2, "--key: '{folder}/pair' holds no key, which is one line of printable"),
    ("bench --key {folder}/latin", 2, "--key: '{folder}/latin' holds no key, which is one line of printable"),
    # Values.
    ("agent", 2, "--model must be given"),
    ("agent --attach x", 2, "--dialect must be given"),
    ("proxy --port", 2, "--port: its value is missing, a whole number"),
    ("proxy --log-format jsn", 2, "--log-format: 'jsn' is not one of text, json; did you mean json?"),
    ("up --otlp-endpoint localhost:4318", 2, "--otlp-endpoint must be a URL such as http://localhost:4318"),
    ("proxy --port abc", 2, "--port: 'abc' is not a whole number"),
    ("proxy --port 99999", 2, "--port must be a port number (0-65535), got 99999"),
    ("proxy --queue-timeout-s 5s", 2, "--queue-timeout-s: '5s' is not a number"),
    ("proxy --queue-timeout-s 0", 2, "--queue-timeout-s must be greater than 0, got 0.0"),
    ("proxy --log-prompts maybe", 2, "--log-prompts: 'maybe' is not true or false"),
    ("proxy --log-level loud", 2, "--log-level: 'loud' is not one of debug, info, warning, error"),
    ("proxy --decode-policy least", 2, "--decode-policy: 'least' is not one of "),
    ("proxy --retries -1", 2, "--retries must not be negative, got -1"),
    ("proxy --workers 0", 2, "--workers must be at least 1, got 0"),
    ("proxy --tls-cert {folder}/junk", 2, "--tls-cert and --tls-key must be given together"),
    ("proxy --allow-address 10.0.0.0/99", 2, "'10.0.0.0/99' is not a network, address or host name"),
    ("proxy --prefill x --dialect sglang", 2, "'x' is not http://host:port"),
    ("proxy --prefill http://a:1", 2, "no dialect is given; choose from vllm-"),
    ("proxy --prefill http://a:1 --dialect sglng", 2, "--dialect: 'sglng' is not one of "),
    ("agent --role decoder", 2, "'decoder' is not one of prefill, decode, both; did you mean decode?"),
    (f"agent {MODEL} --prefill-chunk 100", 2, "--prefill-chunk (100) must be a multiple of --block-size"),
    (f"agent {MODEL} --kv-blocks -1", 2, "--kv-blocks must be at least 1, got -1"),
    (f"agent {MODEL} --device gpu", 2, "--device must be cpu, cuda or cuda:N, got 'gpu'"),
    (f"agent {MODEL} --proxy nowhere", 2, "--proxy must be HOST:PORT, got 'nowhere'"),
    (f"agent {MODEL} --proxy http://h:10001", 2, "--proxy must be HOST:PORT of a proxy's discovery (port 3"),
    (f"agent {MODEL} --proxy tcp://h:36367", 2, "by default), not a URL, got 'tcp://h:36367'"),
    ("agent --attach http://a:1 --dialect sglang --proxy http://h:1", 2, "--proxy must be HOST:PORT of a "),
    ("agent --engine vllm --model m --proxy http://h:1", 2, "--proxy must be HOST:PORT of a proxy's "),
    (f"agent {MODEL} --host 0.0.0.0 --proxy a:5", 2, "--advertise-host is needed when host is '0.0.0.0'"),
    (f"agent {MODEL} --advertise-host http://a:1 --proxy a:5", 2, "--advertise-host must be a name or an "),
    (f"agent {MODEL} --host http://a", 2, "--host must be a name or an address, got 'http://a'"),
    ("agent --engine vllm --model m --advertise-host http://a:1", 2, "--advertise-host must be a name or an"),
    (f"agent {MODEL} --transfer rdma", 2, "--transfer: 'rdma' is not one of auto, mori, cuda_ipc, nixl, "),
    (f"agent {MODEL} --transfer-options tcp.streams=4", 2, "the transfer backend tcp takes no options"),
    (f"agent {MODEL} --transfer-options streams=4", 2, "a transfer option must be BACKEND.NAME=VALUE"),
    (f"agent {MODEL} --tp 3", 2, "(8) cannot be split evenly over 3 ranks; --tp may be 1, 2, 4"),
    ("up --tp 3", 2, "(8) cannot be split evenly over 3 ranks; --tp may be 1, 2, 4"),
    ("serve {folder}/cut", 2, "/model.safetensors: it has 90000 bytes, and its header says 3635456; "),
    ("agent --model {folder}/shards", 2, "/model-00002-of-00002.safetensors: it is missing, and model."),
    ("agent --model {folder}/html", 2, "html/config.json is not JSON: "),
    ("agent --model Qwen/Qwen3-0.6B", 2, "not in the Hugging Face cache; to fetch it: hf download Qwen/"),
    ("agent --model /nonexistent", 2, "and not in the Hugging Face cache (see"),
    ("agent --model no", 2, "'no' is no directory, no bundled model (ferry-tiny), and not in the Hugging"),
    ("agent --model {folder}", 2, "has no config.json"),
    # Files.
    ("proxy --config {folder}/none.yml", 2, "--config: '{folder}/none.yml': No such file or directory"),
    ("proxy --config {folder}/bad.yml", 2, "--config: no such setting 'prt'; did you mean port?"),
    ("proxy --config {folder}/wrong.yml", 2, "--port: 'abc' is not a whole number"),
    ("proxy --config {folder}/torn.yml", 2, "but found '<stream end>' in line 2, column 1 (see kvferry"),
    ("proxy --config {folder}/deep.yml", 2, "more than 8 maps and lists lie within each other"),
    ("up --config {folder}/deep.yml", 2, "more than 8 maps and lists lie within each other"),
    ("proxy --nodes {folder}/deep.yml", 1, "more than 8 maps and lists lie within each other"),
    ("proxy --config {folder}/alias.yml", 2, "an alias (*NAME) is not allowed here"),
    ("proxy --config {folder}/many.yml", 2, "many.yml' is not YAML: "),
    ("proxy --config {folder}/list.yml", 2, "list.yml' holds no settings, one a line as `port: 8000`"),
    ("proxy --config {folder}/kind.yml", 2, "--host: 5 is not a text"),
    ("proxy --config {folder}/nested.yml", 2, "--port: {{'number': 5}} is not a whole number"),
    ("proxy --api-keys {folder}/none", 2, "no such file"),
    (f"agent {MODEL} --cluster-key {{folder}}/none", 2, "--cluster-key: '{folder}/none': no such file"),
    ("proxy --cluster-key {folder}/open.key", 1, "open.key can be read or written by others: chmod 600 it"),
    ("proxy --cluster-key {folder}/junk", 1, "junk does not hold a cluster key"),
    ("proxy --tls-cert {folder}/junk --tls-key {folder}/junk", 1, "are no certificate and its key"),
    ("keygen {folder}/junk", 1, "kvferry keygen: {folder}/junk: File exists"),
    ("proxy --config", 2, "--config: its value is missing, a file"),
    ("agent --config {folder}", 2, "--config: '{folder}': Is a directory"),
    ("proxy --nodes {folder}/none", 1, "{folder}/none: No such file or directory"),
    ("up --log-dir {folder}/junk/logs", 1, "{folder}/junk/logs: Not a directory"),
    # What is there already, or is not.
    ("drain prefill-0", 2, "URL: 'prefill-0' is not http://HOST:PORT or https://HOST:PORT"),
    ("drain http://127.0.0.1:9 --timeout-s 5 prefill-0", 1, "http://127.0.0.1:9 cannot be reached: Conn"),
    ("drain http://127.0.0.1:9", 1, "http://127.0.0.1:9 cannot be reached: Connection "),
    ("proxy --host 203.0.113.9", 1, "cannot listen on 203.0.113.9:0: Cannot assign requested address"),
    ("proxy --host no.invalid", 1, "cannot listen on no.invalid:0: "),
    ("proxy --port {taken}", 1, "cannot listen on 127.0.0.1:{taken}: Address already in use"),
    ("proxy --port {taken} --workers 2", 1, "cannot listen on 127.0.0.1:{taken}: Address already in use"),
    ("up --port {taken} --log-dir {folder}", 1, "cannot listen on 127.0.0.1:{taken}: Address already in use"),
    ("proxy --port 0 --discovery-port {taken}", 1, "cannot bind discovery to 127.0.0.1:{taken}: Address"),
]  # fmt: skip


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    (made / "bad.yml").write_text("prt: 1\n")
    (made / "wrong.yml").write_text("port: abc\n")
    (made / "torn.yml").write_text("port: [\n")
    (made / "tab.yml").write_text("port:\n\t- 5\n")
    (made / "bell.yml").write_text("port: \a\n")
    (made / "fleet.yml").write_text("decode: {count: 2, lase-s: 5}\n")
    (made / "chosen.yml").write_text("agent: {port: 5}\n")
    (made / "deep.yml").write_text("port: " + "[" * 5000 + "]" * 5000 + "\n")
    (made / "alias.yml").write_text("proxy: &a [x, x]\nhost: *a\n")
    (made / "many.yml").write_text("port: " + "9" * 5000 + "\n")
    (made / "list.yml").write_text("- port: 5\n")
    (made / "kind.yml").write_text("host: 5\n")
    (made / "nested.yml").write_text("port: {number: 5}\n")
    (made / "keys").write_text("client-key-0123456789\n")
    (made / "pair").write_text("client-key-0123456789\nadmin-key-0123456789 admin\n")
    for name in ("cut", "shards", "html"):
        shutil.copytree(BUNDLED_MODELS / "ferry-tiny", made / name)
    whole = made / "cut" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:90_000])
    first = made / "shards" / "model.safetensors"
    first.rename(first.with_name("model-00001-of-00002.safetensors"))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    first.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (made / "html" / "config.json").write_text("<!DOCTYPE html>")
    (made / "latin").write_bytes(b"cl\xe9\n")
    # Of the run before: it is not why the next one does not start.
    (made / "proxy.log").write_text("2026-01-01 00:00:00,000 ERROR proxy the model is not there\n")
    for name, mode in (("junk", 0o600), ("open.key", 0o644)):
        (made / name).write_text("junk\n")
        (made / name).chmod(mode)
    return made


@pytest.mark.parametrize(("command", "status", "said"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_mistake_ends_with_one_line_that_names_it(
    command: str,
    status: int,
    said: str,
    taken: int,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command.format(folder=folder, taken=taken))
    if words[0] == "proxy" and status == 1 and "--discovery-port" not in words:
        words += ["--discovery-port", "0", *([] if "--port" in words else ["--port", "0"])]
    try:
        ended: object = main(words)
    except SystemExit as stop:
        ended = stop.code
    printed, complaint = capfd.readouterr()
    lines = [line for line in complaint.splitlines() if " INFO " not in line]
    assert (ended, printed, len(lines)) == (status, "", 1), complaint
    assert lines[0].startswith("kvferry")
    assert said.format(folder=folder, taken=taken) in lines[0]
    assert not re.search(r"class '|<\w+ string>|ssl:default", lines[0])


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--device cuda:63", 2, "--device cuda:63"),
        ("--port {taken}", 1, "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        ("--control-port {taken}", 1, "cannot bind the control channel to 127.0.0.1:{taken}: Address"),
    ],
)  # fmt: skip
async def test_what_an_agent_does_not_find_ends_it_without_a_traceback(
    options: str, status: int, said: str, taken: int
) -> None:
    words = f"--model ferry-tiny --port 0 --control-port 0 --max-model-len 128 {options}".format(taken=taken)
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.agent", *words.split()),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    _, log = await asyncio.wait_for(agent.communicate(), START_TIMEOUT_S)
    complaints = [line for line in log.decode().splitlines() if re.search(" ERROR |Traceback|^kvferry", line)]
    assert agent.returncode == status
    assert said.format(taken=taken) in complaints[0]
    assert not any("Traceback" in line for line in complaints)
    assert "engine process" not in log.decode() or "--device" in options, (
        "ports are tried before the model is loaded"
    )


async def test_a_proxy_that_cannot_be_reached_is_in_the_agents_log() -> None:
    words = "--model ferry-tiny --port 0 --control-port 0 --max-model-len 128 --proxy 127.0.0.1:9"
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.agent", *words.split()),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert agent.stderr is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while b"WARNING api proxy 127.0.0.1:9: unreachable" not in await agent.stderr.readline():
                assert agent.returncode is None
    finally:
        agent.kill()
        await agent.communicate()
