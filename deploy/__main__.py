# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.deploy` is the `kvferry` command."""

import sys

from kvferry.deploy.cli import main

sys.exit(main())
