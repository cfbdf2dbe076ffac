"""The speculator: owns draft sources and streams token trees to verifiers."""
