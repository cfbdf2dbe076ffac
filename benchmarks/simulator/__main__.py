"""`python -m benchmarks.simulator`."""

import sys

from benchmarks.simulator.run import main

sys.exit(main())
