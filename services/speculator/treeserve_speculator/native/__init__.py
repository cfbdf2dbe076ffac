"""Drafting in C++ for a verifier's own process: the cheap sources and their mixture, without an interpreter between."""
