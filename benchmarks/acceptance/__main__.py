"""`python -m benchmarks.acceptance`."""

import sys

from benchmarks.acceptance.run import main

sys.exit(main())
