"""`python -m benchmarks.sessions`."""

import sys

from benchmarks.sessions.run import main

sys.exit(main())
