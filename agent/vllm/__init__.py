# SPDX-License-Identifier: Apache-2.0
"""Our transfer plane inside unchanged vLLM: its KV connector. `connector`, `plugin`, `stats` import vllm."""
