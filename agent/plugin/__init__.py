# SPDX-License-Identifier: Apache-2.0
"""What our transfer plane needs inside another engine's processes, whichever engine that is."""
