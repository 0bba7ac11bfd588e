"""Noise, filters, samplers, acceptance rules and stopping."""
