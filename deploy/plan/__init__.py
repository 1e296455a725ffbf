# SPDX-License-Identifier: Apache-2.0
"""`kvferry plan`: what a fleet would make of a load, in virtual time."""
