# SPDX-License-Identifier: Apache-2.0
"""How the bundled model `ferry-tiny` was made: tokenizer, tasks, training. Not part of serving."""
