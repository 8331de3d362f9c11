"""Falcon Mamba: Mamba with an RMS norm, without weights, of each of dt, B and C."""
