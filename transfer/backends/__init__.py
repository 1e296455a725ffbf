# SPDX-License-Identifier: Apache-2.0
"""One module per way to move bytes between two pools."""
