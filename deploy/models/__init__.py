# SPDX-License-Identifier: Apache-2.0
"""Bundled checkpoints, a folder each. Installed as `kvferry.models`: data that any package may read."""
