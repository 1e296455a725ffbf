# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back."""
