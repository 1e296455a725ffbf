# SPDX-License-Identifier: Apache-2.0
"""How kvferry is started: the command, the local launcher, the bundled model."""
