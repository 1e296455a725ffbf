# SPDX-License-Identifier: Apache-2.0
"""Tries a grammar: whether it compiles, and what its masks take on the way of an answer."""

from __future__ import annotations

import time

import numpy as np

from kvferry.agent.grammar.compiler import BadGrammar, GrammarCompiler, NoMask

MAX_COMPILE_CPU_S = 1.0
NUM_MASKS = 32
MAX_MASKS_CPU_S = 0.5
_SEED = 0


def trial(compiler: GrammarCompiler, grammar: str) -> str:
    """Return why a grammar cannot be used, or "".

    An answer of random tokens is followed for `NUM_MASKS` tokens: the first mask alone says little. It may
    meet a limit that a model's answers never meet, so a later mask counts by its processor time alone.
    """
    try:
        return _complaint(compiler, grammar)
    except (BadGrammar, NoMask) as error:
        return str(error)
    finally:
        compiler.clear()


def _complaint(compiler: GrammarCompiler, grammar: str) -> str:
    began = time.process_time()
    matcher = compiler.matcher(grammar)
    mask = matcher.mask()
    if time.process_time() - began > MAX_COMPILE_CPU_S:
        return "it takes too long to compile"
    choose, spent = np.random.default_rng(_SEED), 0.0
    for _ in range(NUM_MASKS):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        going_on = np.setdiff1d(allowed, compiler.eos_ids)
        if not going_on.size:
            return ""
        began = time.process_time()
        matcher.add([int(choose.choice(going_on))])
        try:
            mask = matcher.mask()
        except NoMask:
            return ""
        finally:
            spent += time.process_time() - began
        if spent > MAX_MASKS_CPU_S:
            return "its masks take too much processor time"
    return ""
