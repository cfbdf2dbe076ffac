"""Builds draft sources for a target model: on-policy data, training, reports."""
