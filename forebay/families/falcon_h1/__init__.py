"""Falcon-H1: every layer has attention and a Mamba-2 mixer side by side; constants scale most inputs and outputs."""
