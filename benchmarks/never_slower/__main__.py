"""`python -m benchmarks.never_slower`."""

import sys

from benchmarks.never_slower.run import main

sys.exit(main())
