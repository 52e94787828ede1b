"""Settings for the whole test run."""

from __future__ import annotations

import logging

# pytest's log capture would switch torch's structured trace on, which prints every graph.
logging.getLogger("torch.__trace").propagate = False
