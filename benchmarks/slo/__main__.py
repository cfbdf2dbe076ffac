"""`python -m benchmarks.slo`."""

import sys

from benchmarks.slo.run import main

sys.exit(main())
