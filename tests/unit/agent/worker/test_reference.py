# SPDX-License-Identifier: Apache-2.0
"""The self-check of architectures that no test covers: it lets pass what is right, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvferry.agent.architectures import TESTED, UnsupportedModel
from kvferry.agent.cli import model_refusal
from kvferry.agent.config import AgentConfig
from kvferry.agent.worker.reference import check_model
from tests.unit.agent.worker.tiny_models import SHAPE, save_checkpoint, save_model


def save_untested(directory: Path, config: str, **changes: Any) -> AgentConfig:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SHAPE, **changes}))
    assert type(model).__name__ not in TESTED
    return AgentConfig(model=str(save_model(model, directory / "m")))


def test_a_class_that_is_right_passes(tmp_path: Path) -> None:
    check_model(save_untested(tmp_path, "ArceeConfig"))


def test_windows_are_shortened_for_the_comparison(tmp_path: Path) -> None:
    check_model(AgentConfig(model=str(save_checkpoint("Gemma2ForCausalLM", tmp_path))))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("FalconConfig", {"alibi": True, "new_decoder_architecture": False}),
        ("MambaConfig", {"state_size": 8}),
    ],
)
def test_a_class_that_is_not_is_refused(config: str, changes: dict[str, Any], tmp_path: Path) -> None:
    agent = save_untested(tmp_path, config, **changes)
    with pytest.raises((UnsupportedModel, TypeError, AttributeError, RuntimeError)):
        check_model(agent)


def test_a_path_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = save_untested(tmp_path, "ArceeConfig")
    attend = "kvferry.agent.worker.attention._attend"
    from kvferry.agent.worker.attention import _attend

    monkeypatch.setattr(attend, lambda *arguments: _attend(*arguments) * 1.001)
    with pytest.raises(UnsupportedModel, match="log probabilities differ"):
        check_model(agent)


@pytest.mark.timeout(180)  # a process of its own imports torch and transformers
def test_an_agent_tries_an_unknown_architecture_before_it_starts(tmp_path: Path) -> None:
    agent = save_untested(tmp_path, "FalconConfig", alibi=True, new_decoder_architecture=False)
    refused = model_refusal(agent)
    assert refused is not None
    assert refused.startswith("FalconForCausalLM is not supported: ")
    assert "\n" not in refused
