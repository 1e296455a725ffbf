# SPDX-License-Identifier: Apache-2.0
"""The API process: HTTP, tokenizing, detokenizing; talks to the engine process by messages."""
