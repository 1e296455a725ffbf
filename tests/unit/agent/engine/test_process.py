# SPDX-License-Identifier: Apache-2.0
"""The engine process and its ranks, as real processes, against an API process that is a stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest
import zmq

from kvferry.agent.messages.requests import (
    Abort,
    DropTransfer,
    Output,
    RemoteKV,
    RequestFailed,
    ResumedChoice,
    SamplingParams,
    Submit,
)
from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import ControlClient
from kvferry.transfer.plane import RemotePrompt
from tests.helpers.deaths import assert_within, exit_s
from tests.standins.api_process import StandInApi, tiny_config, tokens_of
from tests.unit.agent.worker.tiny_models import reference_answer, save_checkpoint

PROMPT = [(7 * position) % 90 for position in range(53)]
SAMPLING = SamplingParams(seed=1, max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("checkpoint"))


def submit(request_id: str, **changes: Any) -> Submit:
    fields = {"sampling": SAMPLING, "timeout_s": 30.0, **changes}
    return Submit(request_id=request_id, prompt_ids=tuple(PROMPT), **fields)  # type: ignore[arg-type]


def family(api: StandInApi) -> list[psutil.Process]:
    """The engine process, then its ranks."""
    engine = psutil.Process(api.engine.pid)
    return [engine, *engine.children()]


def is_free(api: StandInApi) -> bool:
    stats = api.stats
    return stats is not None and stats.running == 0 and stats.blocks_free == stats.blocks_total


async def test_one_engine_serves_alone_and_two_of_unequal_width_share_a_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    """R12: the pull of a real prompt between real processes, from one rank to two."""
    reference = await asyncio.to_thread(reference_answer, checkpoint, PROMPT, 20)
    expected = [token for token, _ in reference]
    config = tiny_config(checkpoint, prefix_cache=False)
    wide = tiny_config(checkpoint, prefix_cache=False, tp=2)
    async with (
        StandInApi(config, tmp_path / "prefill") as prefill,
        StandInApi(wide, tmp_path / "decode") as decode,
    ):
        assert prefill.ready is not None
        assert decode.ready is not None
        assert (prefill.ready.layout, prefill.ready.weights) == (decode.ready.layout, decode.ready.weights)
        assert prefill.ready.geometry == decode.ready.geometry
        assert prefill.ready.geometry["block_size"] == str(config.block_size)
        await prefill.send(submit("alone"))
        assert tokens_of(await prefill.answer("alone")) == expected

        await prefill.send(submit("first", produce="t"))
        (first,) = await prefill.answer("first")
        assert isinstance(first, Output)
        assert first.leased
        source = RemoteKV(
            transfer_id="t",
            source=RemotePrompt(
                engine_id=prefill.ready.incarnation,
                host="127.0.0.1",
                port=prefill.ready.control_port,
                num_tokens=len(PROMPT),
                tp_size=1,
            ),
        )
        known = ResumedChoice(index=0, token_ids=(first.tokens[0].token_id,), finished=False)
        await decode.send(submit("rest", remote=source, resumed=(known,)))
        rest = await decode.answer("rest")
        assert tokens_of([first, *rest]) == expected
        assert isinstance(rest[-1], Output)
        assert rest[-1].timing is not None
        assert not rest[-1].timing.recomputed
        assert rest[-1].timing.pull_bytes == 4 * 2 * 2 * 2 * 16 * 32 * 4  # blocks, heads, layers, K|V, …
        for api in (prefill, decode):
            await api.until(lambda api=api: is_free(api))
            assert api.stats is not None
            assert api.stats.integrity_errors == 0
        assert prefill.stats is not None
        assert prefill.stats.plane.leases_ended == {"released": 1}


async def test_a_reader_has_the_last_blocks_before_the_first_token_is_drawn(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It learns afterwards that the prompt is ready. I6: both ranks have written their part by then."""
    client, context = ControlClient(lambda: None), zmq.Context()
    async with StandInApi(tiny_config(checkpoint, tp=2), tmp_path / "prefill") as prefill:
        assert prefill.ready is not None
        head = {"incarnation": prefill.ready.incarnation, "consumer": "reader"}

        def ask(kind: type[wire.Request], **fields: Any) -> asyncio.Future[wire.Response | None]:
            answer = asyncio.get_running_loop().create_future()
            client.request(kind(seq=client.next_seq(), **head, **fields), 20.0, answer.set_result)
            return answer

        client.start(context, "127.0.0.1", prefill.ready.control_port)
        try:
            asked = ask(wire.Open, transfer_id="t", have=2, wait_s=20.0)
            await ask(wire.Renew, transfer_ids=())  # then the one before has been taken in
            await prefill.send(submit("p", produce="t"))
            last = await asked
            assert isinstance(last, wire.Opened)
            assert (last.state, last.first_block, len(last.block_ids)) == ("filling", 2, 2)
            ready = await ask(wire.Open, transfer_id="t", have=4, wait_s=20.0)
            assert isinstance(ready, wire.Opened)
            assert (ready.state, ready.block_ids) == ("ready", ())
            assert ready.first_tokens is not None
        finally:
            client.close()
            context.term()


async def test_requests_end_as_they_should_and_an_idle_engine_sleeps_and_stops(
    checkpoint: Path, tmp_path: Path
) -> None:
    """R24: nothing spins while it waits. R7: everything ends within seconds."""
    async with StandInApi(tiny_config(checkpoint), tmp_path / "agent") as api:
        endless = SamplingParams(seed=1, max_tokens=450, ignore_eos=True)
        await api.send(submit("late", sampling=endless, timeout_s=0.05))
        (*_, late) = await api.answer("late")
        assert isinstance(late, RequestFailed)
        assert (late.status, late.code) == (504, "timeout")

        await api.send(submit("unwanted", sampling=endless))
        await api.until(lambda: "unwanted" in api.answers)
        await api.send(Abort(request_id="unwanted"))
        await api.until(lambda: is_free(api))
        assert not any(
            isinstance(message, RequestFailed) or message.done for message in api.answers["unwanted"]
        )

        await api.send(submit("pinned", produce="t"))
        await api.answer("pinned")
        await api.until(lambda: api.stats is not None and api.stats.blocks_leased == 4)
        await api.send(DropTransfer(transfer_id="t"))
        await api.until(lambda: is_free(api))

        processes = family(api)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.sleep(2)  # the time over which idleness is measured, not a wait for something
        spent = [sum(p.cpu_times()[:2]) - start for p, start in zip(processes, before, strict=True)]
        assert max(spent) <= 2 * 0.02 + 0.01, spent  # of one core; the clock ticks in hundredths

        os.kill(api.engine.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await api.engine.wait() == 0
        assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.mark.parametrize("victim", ["a rank", "the engine"])
async def test_the_death_of_any_process_ends_all_within_a_second(
    victim: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Design I8."""

    async def death_s() -> float:
        async with StandInApi(tiny_config(checkpoint, tp=2), Path(mkdtemp(dir=tmp_path)) / "agent") as api:
            endless = SamplingParams(seed=1, max_tokens=450, ignore_eos=True)
            await api.send(submit("under way", sampling=endless))
            await api.until(lambda: "under way" in api.answers)
            processes = family(api)
            assert len(processes) == 3
            handles = [os.pidfd_open(process.pid) for process in processes]
            processes[0 if victim == "the engine" else 2].kill()
            took = await exit_s(handles)
            assert await api.engine.wait() != 0
            return took

    await assert_within(death_s, 1.0)


async def test_a_model_that_cannot_be_loaded_ends_the_engine_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    api = StandInApi(tiny_config(tmp_path / "model"), tmp_path / "agent")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        async with api:
            raise AssertionError("became ready")
