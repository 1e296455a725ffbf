# SPDX-License-Identifier: Apache-2.0
"""An assistant's message within the text of an answer: reasoning, content, and calls of tools."""
