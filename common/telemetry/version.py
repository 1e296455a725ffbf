# SPDX-License-Identifier: Apache-2.0
"""The version of kvferry that runs."""

from importlib.metadata import version

VERSION = version("kvferry")
"""Read once: the file of metadata is parsed at each call."""
