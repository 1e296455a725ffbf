# SPDX-License-Identifier: Apache-2.0
"""Every decoder class of transformers that builds from a tiny config is right here, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvferry.agent.architectures import TESTED, UnsupportedModel
from kvferry.agent.config import AgentConfig
from kvferry.agent.worker.reference import TOLERANCE, check_model
from tests.unit.agent.worker.test_model import COUNT, NUM_BLOCKS, PROMPT, TABLE
from tests.unit.agent.worker.tiny_models import (
    SHAPE,
    greedy_answer,
    load_model,
    make_runner,
    reference_answer,
    save_model,
)

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LARGEST = 20_000_000
"""Parameters; what is larger has ignored the shape that was asked for."""


def known(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of the settings that the class has; a configuration keeps others as if they meant something."""
    try:
        default = AutoConfig.for_model(model_type)
    except Exception:  # noqa: BLE001 (it is not made without settings)
        return settings
    return {name: value for name, value in settings.items() if hasattr(default, name)}


def tiny(model_type: str) -> torch.nn.Module:
    """Build the class with few and small layers; skip the test where that does not work."""
    shape = {**SHAPE, **_EXPERTS}
    for settings in (known(model_type, shape), shape, SHAPE):
        try:
            config = AutoConfig.for_model(model_type, **settings)
            with torch.device("meta"):
                size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
            if size <= _LARGEST:
                torch.manual_seed(11)
                return AutoModelForCausalLM.from_config(config)
        except Exception as error:  # noqa: BLE001 (whatever a class does not like)
            reason = repr(error)
        else:
            reason = f"{size} parameters"
    pytest.skip(f"does not build from a tiny config: {reason[:100]}")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_decoder_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    path = save_model(model, tmp_path)
    try:
        check_model(AgentConfig(model=str(path)))
    except Exception as error:  # noqa: BLE001 (the process of the self-check refuses all of them)
        assert type(model).__name__ not in TESTED
        print(f"{type(model).__name__}: refused: {error}")
        return
    try:
        runner = make_runner(load_model(path), NUM_BLOCKS)
        answer = greedy_answer(runner, TABLE, PROMPT, COUNT)
    except UnsupportedModel as error:
        pytest.fail(f"{type(model).__name__} passed its self-check and was refused then: {error}")
    reference = reference_answer(path, PROMPT, COUNT)
    assert [token for token, _ in answer] == [token for token, _ in reference]
    assert max(abs(own - other) for (_, own), (_, other) in zip(answer, reference, strict=True)) <= TOLERANCE
    print(f"{type(model).__name__}: right")
