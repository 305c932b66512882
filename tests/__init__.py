"""Tests, mirroring the packages. `reference` holds slow, obviously right re-implementations used as oracles."""
