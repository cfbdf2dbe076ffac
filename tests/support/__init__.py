"""What several test suites build on."""
