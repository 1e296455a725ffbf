# SPDX-License-Identifier: Apache-2.0
"""Other APIs than OpenAI's completions, each rewritten as a chat, and its answer rewritten back; pure."""
