# SPDX-License-Identifier: Apache-2.0
"""How soon requests should be answered that do not say so themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvferry.common.shared_options import check_positive


class Objective(NamedTuple):
    """Seconds until the first token, and mean seconds per token after it."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


class ModelObjectives:
    """Objectives by model. `default` and `of_models` are to be read only.

    Args:
        default: Of models without their own.
        of_models: Those of others, MODEL=TTFT/TPOT in seconds.

    Raises:
        ValueError: if one of them is not of this form, or a model has two.
    """

    def __init__(self, default: Objective = Objective(), of_models: Iterable[str] = ()) -> None:  # noqa: B008
        self.default = default
        self.of_models: dict[str, Objective] = {}
        for words in of_models:
            model, _, values = words.rpartition("=")
            ttft, _, tpot = values.partition("/")
            try:
                objective = Objective(float(ttft), float(tpot))
            except ValueError:
                model = ""
            if not model:
                raise ValueError(f"model_objectives must be MODEL=TTFT/TPOT, in seconds: {words!r}")
            for seconds in objective:
                check_positive(model_objectives=seconds)
            if model in self.of_models:
                raise ValueError(f"model_objectives names {model!r} twice")
            self.of_models[model] = objective

    def of(self, model: str) -> Objective:
        """Return the objectives of a model's requests."""
        return self.of_models.get(model, self.default)


DEFAULT = ModelObjectives()
